"""Allow one phosd per state and runtime folder: two would take each other's jobs for dead."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from phosd.errors import Busy

_FILE = "phosd.lock"
"""The locked file. Not the folder itself, which any user who can read it could lock for ever."""


@contextlib.contextmanager
def alone(*folders: Path) -> Iterator[None]:
    """Lock these folders against other instances of phosd inside the context.

    Raises :class:`Busy` naming the first folder in use. The kernel releases the lock when the
    process ends, however it ends.
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
    """Return whether a running phosd has locked this folder; for the folder's owner."""
    if not (folder / _FILE).exists():
        return False
    try:
        with alone(folder):
            return False
    except Busy:
        return True
