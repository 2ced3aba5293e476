"""One phosd a state folder, and one a runtime folder: two would take each other's jobs for dead."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from phosd.errors import Busy

_FILE = "phosd.lock"
"""What is locked. Not the folder itself: whoever may look into it could hold it, for ever."""


@contextlib.contextmanager
def alone(*folders: Path) -> Iterator[None]:
    """No other phosd uses these folders inside. Raises :class:`Busy` naming the first that is used.

    The kernel ends the lock with the process, however that ends.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(folder / _FILE, flags, 0o600)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"another phosd runs with {folder}, perhaps on another bus",
                    hint="end that one, or give this one folders of its own (--state-dir,"
                    " --runtime-dir)",
                ) from None
        yield


def in_use(folder: Path) -> bool:
    """Whether a phosd runs with this folder, as far as its lock tells; for the folder's owner."""
    if not (folder / _FILE).exists():
        return False
    try:
        with alone(folder):
            return False
    except Busy:
        return True
