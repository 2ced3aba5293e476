"""Answer CRIU at points of its run, through its action script.

CRIU runs the script at certain points and waits for it. It tells us through a fifo
where CRIU is, and waits for our word: ``ok``, and CRIU goes on; anything else makes it give up, and
the tree goes on as well.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

STARTED = "pre-dump"
"""CRIU is ready and has not looked at the tree."""
FROZEN = "post-dump"
"""Everything is dumped and the tree still stands still."""

_SCRIPT = """#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in pre-dump) looks=86400 ;; post-dump) looks=60 ;; *) exit 0 ;; esac
exec 3<>reached
echo "$CRTOOLS_SCRIPT_ACTION" >&3
# Should nobody be left to answer, or to hear it, the tree must not stay frozen.
while [ -p answer ] && [ -d /proc/{pid} ] && [ -d "/proc/$PPID" ] && [ "$looks" -gt 0 ]; do
  looks=$((looks - 1))
  answer=$(timeout 1 head -n 1 answer)
  [ -z "$answer" ] || break
done
[ "$answer" = ok ]
"""


class ActionScript:
    """Wait for CRIU at its start, and call an action once when the tree is frozen.

    ``work`` is CRIU's working folder, and ``reader`` the user whom the script runs as. What the
    action raises is kept in ``error``, and CRIU gives up.
    """

    WORDS = ("--action-script", "./meet.sh")
    """For CRIU's command line; it runs the script in its working folder."""

    def __init__(self, work: Path, reader: int, when_frozen: Callable[[], object]) -> None:
        self._when_frozen = when_frozen
        self._work = work
        self.error: Exception | None = None
        self.refused = False
        self.reached: set[str] = set()
        script = work / "meet.sh"
        script.write_text(_SCRIPT.replace("{pid}", str(os.getpid())))
        script.chmod(0o755)
        self._reached, self._answer = (self._fifo(name, reader) for name in ("reached", "answer"))

    def _fifo(self, name: str, user: int) -> int:
        os.mkfifo(self._work / name, 0o600)
        os.chown(self._work / name, user, -1)
        # Open at both ends, so that neither side waits for one that was killed meanwhile.
        return os.open(self._work / name, os.O_RDWR | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reached)
        os.close(self._answer)
        for name in ("meet.sh", "reached", "answer"):
            (self._work / name).unlink()

    def fileno(self) -> int:
        """Readable when CRIU waits for us."""
        return self._reached

    def attend(self) -> None:
        """Take what CRIU has said. When the tree is frozen, do the action and answer."""
        try:
            where = os.read(self._reached, 64).decode(errors="replace").strip()
        except BlockingIOError:  # it is not there yet
            return
        if where in self.reached or where not in (STARTED, FROZEN):
            return
        self.reached.add(where)
        if where == STARTED:
            return
        try:
            if not self.refused:
                self._when_frozen()
        except Exception as error:
            # It cannot be raised before CRIU has let the tree go; the caller raises it then.
            self.error = error
        os.write(self._answer, b"failed\n" if self.refused or self.error else b"ok\n")

    def refuse(self) -> None:
        """Have CRIU give up when it asks next. It cannot be ended earlier: killed while it runs its
        code in a process, it would leave that process with it.
        """
        self.refused = True

    def let_go_on(self) -> None:
        """CRIU waits at its start: let it begin."""
        os.write(self._answer, b"ok\n")
