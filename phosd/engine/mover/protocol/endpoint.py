"""Create and find the movers' sockets: ``<runtime dir>/mover/<gpu>.sock``, in a folder of root."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from phosd import unix_sockets
from phosd.engine.image.private_files import require_private
from phosd.engine.mover.protocol.connection import Connection
from phosd.engine.system import procfs
from phosd.errors import Busy


def folder_of(runtime_dir: Path) -> Path:
    """Return the folder of the movers' sockets; create it if it does not exist."""
    folder = runtime_dir / "mover"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(folder)
    return folder


def sockets(runtime_dir: Path) -> list[Path]:
    """Return the sockets of all movers, including those of killed ones."""
    folder = runtime_dir / "mover"
    return sorted(folder.glob("*.sock")) if folder.is_dir() else []


def listeners(runtime_dir: Path) -> set[int]:
    """Return the pids of all movers, whoever started them: each holds a lock (:func:`listening`).

    Nobody else may take such a lock, not even to try: a mover that starts then would give up.
    """
    locks = {
        f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for found in (path.stat() for path in (runtime_dir / "mover").glob("*.lock"))
    }
    held = (line.split() for line in (procfs.PROC / "locks").read_text().splitlines())
    return {int(words[-4]) for words in held if words[-3] in locks and "->" not in words}


def path_of(runtime_dir: Path, gpu: int) -> Path:
    """Return the path of the socket of the mover of GPU ``gpu``."""
    return runtime_dir / "mover" / f"{gpu}.sock"


@contextlib.contextmanager
def listening(runtime_dir: Path, gpu: int) -> Iterator[socket.socket]:
    """Listen as the only mover of ``gpu`` inside. Raises :class:`Busy` if there is another."""
    path = folder_of(runtime_dir) / f"{gpu}.sock"
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"GPU {gpu} has a data mover", hint="connect to that one") from None
        path.unlink(missing_ok=True)  # left by a mover that was killed
        with unix_sockets.listening(path, descriptors=True) as listener:
            try:
                yield listener
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def connect(path: Path) -> Connection | None:
    """Connect to the mover that listens on ``path``; return None if none does."""
    end = unix_sockets.unix_socket(descriptors=True)
    try:
        end.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        end.close()
        return None
    except BaseException:
        end.close()
        raise
    return Connection(end)
