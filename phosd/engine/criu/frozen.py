"""Doing something of one's own while CRIU holds the tree frozen.

CRIU runs an action script when everything is dumped and the tree still stands still. The script
tells us through a fifo and waits for our word: ``ok``, and CRIU lets the tree go on; anything else
makes it undo the dump, and the tree goes on as well.
"""

import os
import select
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

_SCRIPT = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
# Should nobody be left to answer, the tree must not stay frozen.
echo frozen > frozen && [ "$(timeout 60 head -n 1 answer)" = ok ]
"""


class WhileFrozen:
    """Calls ``action`` once, when the tree is frozen; what it raises is kept in ``error``.

    ``work`` is CRIU's working folder, and ``reader`` the user whom the script runs as.
    """

    WORDS = ("--action-script", "./frozen.sh")
    """For CRIU's command line; it runs the script in its working folder."""

    def __init__(self, work: Path, reader: int, action: Callable[[], None]) -> None:
        self._action = action
        self._work = work
        self.error: Exception | None = None
        self.called = False
        script = work / "frozen.sh"
        script.write_text(_SCRIPT)
        script.chmod(0o755)
        self._frozen, self._answer = (self._fifo(name, reader) for name in ("frozen", "answer"))

    def _fifo(self, name: str, user: int) -> int:
        os.mkfifo(self._work / name, 0o600)
        os.chown(self._work / name, user, -1)
        # Open at both ends, so that neither side waits for one that was killed meanwhile.
        return os.open(self._work / name, os.O_RDWR | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._frozen)
        os.close(self._answer)
        for name in ("frozen.sh", "frozen", "answer"):
            (self._work / name).unlink()

    def poll(self) -> None:
        """Look whether the tree is frozen by now, and if so do the action and answer."""
        if self.called or not select.select([self._frozen], [], [], 0)[0]:
            return
        self.called = True
        answer = b"failed\n"
        try:
            self._action()
            answer = b"ok\n"
        except Exception as error:
            # It cannot be raised before CRIU has let the tree go; the caller raises it then.
            self.error = error
        os.write(self._answer, answer)
