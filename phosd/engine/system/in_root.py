"""Open a file as a process in another root sees it, whatever links it has put on the way.

    in_root.py ROOT PATH

The file systems on the way may be a user's (FUSE, also below an overlay), whose server never
answers: who waits for it cannot be killed. So phosd runs this file, which imports nothing of phosd,
as a process that can be left behind (:mod:`~phosd.engine.system.places_apart`). Its standard input
is the socket that the opened file is sent to.

This is what openat2(2) does with ``RESOLVE_IN_ROOT``, but that systemd refuses it to a service with
``RestrictSUIDSGID=``, as phosd is: its filter cannot look at what openat2 is given. Links of
``/proc`` are taken for what they say: they lead nowhere but to a path in this root.
"""

import errno
import os
import socket
import stat
import sys
from contextlib import ExitStack

_MOST_LINKS = 40
"""As the kernel has it."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def place_in_root(root: int, path: str, *, links: bool = False) -> int:
    """Open a path below an open folder, which is its root, as ``O_PATH``.

    With ``links`` symbolic links are followed, and stay in this root; else there may be none.
    Raises :class:`OSError`.
    """
    left = path.split("/")[::-1]
    followed = 0
    with ExitStack() as files:
        here = [root]  # and what is below it
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not stat.S_ISDIR(os.fstat(here[-1]).st_mode):
                    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
                here = here[:-1] or [root]
                continue
            found = os.open(part, _PLACE, dir_fd=here[-1])
            files.callback(os.close, found)
            if not stat.S_ISLNK(os.fstat(found).st_mode):
                here.append(found)
                continue
            followed += 1
            if not links or followed > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink("", dir_fd=found)
            left += target.split("/")[::-1]
            if target.startswith("/"):
                here = [root]
        return os.dup(here[-1])


def main() -> None:
    try:
        found = place_in_root(int(sys.argv[1]), sys.argv[2])
    except OSError as error:
        sys.exit(error.strerror)
    with socket.socket(fileno=0) as told:
        socket.send_fds(told, [b"f"], [found])


if __name__ == "__main__":
    main()
