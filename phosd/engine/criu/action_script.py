"""Answer CRIU at points of its run, through its action script.

CRIU runs the script at certain points and waits for it. It tells us through a fifo where CRIU is,
and waits for a file with our answer: ``ok``, and CRIU goes on; anything else makes it give up, and
the tree goes on as well. The file stays, so that no answer can get lost on its way; a second fifo
only wakes the script, which looks every second without it.
"""

import contextlib
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
answer=$CRTOOLS_SCRIPT_ACTION.answer
exec 3<>reached
echo "$CRTOOLS_SCRIPT_ACTION" >&3
# Should nobody be left to answer, or to hear it, the tree must not stay frozen.
until [ -s "$answer" ]; do
  looks=$((looks - 1))
  [ -p wake ] && [ -d /proc/{pid} ] && [ -d "/proc/$PPID" ] && [ "$looks" -ge 0 ] || exit 1
  timeout 1 head -n 1 wake >/dev/null
done
[ "$(cat "$answer")" = ok ]
"""

_FIFOS = ("reached", "wake")


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
        # All are made before the reader's code runs and used by descriptor: the folder is theirs.
        self._reached, self._wake = (self._fifo(name, reader) for name in _FIFOS)
        self._answers = {where: self._file(where) for where in (STARTED, FROZEN)}

    def _fifo(self, name: str, user: int) -> int:
        os.mkfifo(self._work / name, 0o600)
        os.chown(self._work / name, user, -1)
        # Open at both ends, so that neither side waits for one that was killed meanwhile.
        return os.open(self._work / name, os.O_RDWR | os.O_NONBLOCK)

    def _file(self, where: str) -> int:
        """An empty file, for an answer that the reader may read."""
        descriptor = os.open(self._work / _answer(where), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.fchmod(descriptor, 0o644)
        return descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._reached, self._wake, *self._answers.values()):
            os.close(descriptor)
        for name in ("meet.sh", *_FIFOS, *map(_answer, self._answers)):
            (self._work / name).unlink(missing_ok=True)

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
        self._say(FROZEN, "failed" if self.refused or self.error else "ok")

    def refuse(self) -> None:
        """Have CRIU give up where it waits, or when it asks next. It cannot be ended earlier:
        killed while it runs its code in a process, it would leave that process with it.
        """
        self.refused = True
        self._say(STARTED, "failed")

    def let_go_on(self) -> None:
        """CRIU waits at its start: let it begin."""
        self._say(STARTED, "ok")

    def _say(self, where: str, answer: str) -> None:
        os.pwrite(self._answers[where], f"{answer}\n".encode(), 0)
        with contextlib.suppress(BlockingIOError):  # it is full of what wakes as well
            os.write(self._wake, b"\n")


def _answer(where: str) -> str:
    """The name of the file with our answer."""
    return f"{where}.answer"
