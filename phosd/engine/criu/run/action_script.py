"""Answer CRIU at certain points of its run, through its action script.

CRIU runs the script at these points and waits for it. The script reports the point through a fifo,
and waits for a file with our answer: at ``ok`` CRIU continues; at anything else it gives up and
releases the tree. The answer stays in the file, so that it cannot get lost; a second fifo only
wakes the script, which otherwise checks every second.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

STARTED = "pre-dump"
"""CRIU is ready and has not touched the tree."""
FROZEN = "post-dump"
"""Everything is dumped, and the tree is still frozen."""
MADE = "post-restore"
"""All tasks are made and have their memory, and none runs. If a restore gives up here, CRIU kills
them.
"""
RESTORED = "pre-resume"
"""Everything is restored, rights included, and no task of the tree runs yet."""

_SCRIPT = """#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in
  pre-dump | post-restore) looks=86400 ;;
  post-dump | pre-resume) looks=60 ;;
  *) exit 0 ;;
esac
answer=$CRTOOLS_SCRIPT_ACTION.answer
exec 3<>reached
echo "$CRTOOLS_SCRIPT_ACTION" >&3
# Should nobody be left to answer, or to hear it, the tree must not stay frozen.
alone=0
until [ -s "$answer" ]; do
  looks=$((looks - 1))
  [ -p wake ] && [ -d "/proc/$PPID" ] && [ "$looks" -ge 0 ] || exit 1
  if timeout 1 sh -c ': >wake'; then  # who would answer reads it
    alone=0
    timeout 1 head -n 1 wake >/dev/null
  else  # or the machine is too busy to start a program in a second
    alone=$((alone + 1))
    [ "$alone" -lt 5 ] || exit 1
  fi
done
[ "$(cat "$answer")" = ok ]
"""

_FIFOS = ("reached", "wake")


class ActionScript:
    """Wait until a dump has started, and call an action once while the whole tree stands still.

    ``work`` is CRIU's working folder, and ``reader`` the user that the script runs as. The action
    is for the point ``held``, :data:`FROZEN` or :data:`RESTORED`. An exception of it is kept in
    ``error``. A dump gives up then; a restore goes on, and whoever waits for it has to kill it.
    A restore waits at :data:`MADE` until ``complete`` returns True; if that raises, CRIU gives up.
    """

    WORDS = ("--action-script", "./meet.sh")
    """CRIU's option for the script, which runs in CRIU's working folder."""

    def __init__(
        self,
        work: Path,
        reader: int,
        action: Callable[[], object],
        held: str = FROZEN,
        complete: Callable[[], bool] = lambda: True,
    ) -> None:
        self._action = action
        self._complete = complete
        self.waits = False
        """Whether CRIU waits until all is complete."""
        self._held = held
        self._work = work
        self.error: Exception | None = None
        self.refused = False
        self.reached: set[str] = set()
        script = work / "meet.sh"
        script.write_text(_SCRIPT)
        script.chmod(0o755)
        # Created before the reader's code runs, and used by descriptor, as the reader owns the
        # folder.
        self._reached, self._wake = (self._fifo(name, reader) for name in _FIFOS)
        self._answers = {where: self._file(where) for where in (STARTED, MADE, held)}

    def _fifo(self, name: str, user: int) -> int:
        os.mkfifo(self._work / name, 0o600)
        os.chown(self._work / name, user, -1)
        # Opened for reading and writing, so that neither side waits for one that was killed.
        return os.open(self._work / name, os.O_RDWR | os.O_NONBLOCK)

    def _file(self, where: str) -> int:
        """Create an empty file for an answer, which the reader may read."""
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
        """Return a descriptor that is readable when CRIU waits for an answer."""
        return self._reached

    def attend(self) -> None:
        """Read which point CRIU has reached. If the tree is held, run the action and answer."""
        with contextlib.suppress(BlockingIOError):  # nothing was written
            self._has_reached(os.read(self._reached, 64).decode(errors="replace").strip())
        if self.waits:
            try:
                self.waits = not self._complete()
            except Exception as error:
                self.error, self.waits = error, False
            if not self.waits:
                self._say(MADE, "failed" if self.error else "ok")

    def _has_reached(self, where: str) -> None:
        if where in self.reached or where not in self._answers:
            return
        self.reached.add(where)
        if where == MADE:
            self.waits = True
        if where != self._held:
            return
        try:
            if not self.refused:
                self._action()
        except Exception as error:
            # Not raised before CRIU has released the tree; the caller raises it then.
            self.error = error
        self._say(self._held, "failed" if self.refused or self.error else "ok")

    def refuse(self) -> None:
        """Make CRIU give up at the point where it waits, or at the next one.

        It must not be killed before: killed while its code runs in a process, it would take the
        process with it.
        """
        self.refused = True
        self._say(STARTED, "failed")
        self._say(self._held, "failed")

    def let_go_on(self) -> None:
        """Let CRIU, which waits at its start, begin."""
        self._say(STARTED, "ok")

    def _say(self, where: str, answer: str) -> None:
        os.pwrite(self._answers[where], f"{answer}\n".encode(), 0)
        # Full: then there is something to wake the script.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\n")


def _answer(where: str) -> str:
    """Return the name of the file with our answer."""
    return f"{where}.answer"
