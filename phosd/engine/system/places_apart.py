"""Open what a process sees at a path by a process of ours that can be left behind.

A user who has a user namespace mounts FUSE there, and an overlay over that, which asks the server
of the former with the rights of who has mounted it, whoever looks. A process that waits for
such a server can neither be killed nor end.
"""

import os
import socket
import subprocess
import sys
import threading

from phosd import unix_sockets
from phosd.engine.system import in_root
from phosd.engine.system.reaping import reap_later

TIMEOUT = 2.0
"""Seconds that a look may take."""
_stuck: dict[str, "subprocess.Popen[bytes]"] = {}
"""The processes that still wait, by what they wait for."""
_lock = threading.Lock()


def place_in_root(root: int, path: str, what: str) -> int | None:
    """Open a path below an open folder as ``O_PATH``, without links; None if there is nothing, or
    its server does not answer.

    While that has not answered nobody looks again for the same ``what``.
    """
    with _lock:
        for each in [each for each, child in _stuck.items() if child.poll() is not None]:
            del _stuck[each]
        if what in _stuck:
            return None
    ours, theirs = unix_sockets.pair(descriptors=True)
    with ours:
        with theirs:
            child = subprocess.Popen(
                (sys.executable, "-I", "-S", in_root.__file__, str(root), path),
                stdin=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(root,),
            )
        ours.settimeout(TIMEOUT)
        try:
            found = socket.recv_fds(ours, 1, 1)[1]
        except TimeoutError:
            child.kill()
            with _lock:
                _stuck[what] = child
            reap_later(child)
            return None
    child.wait()
    if not found:
        return None
    os.set_inheritable(found[0], False)
    return found[0]
