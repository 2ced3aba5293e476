"""Two processes, which speak by a socket."""

import os
import socket
from collections.abc import Callable


def run_both(
    first: Callable[[socket.socket], object], second: Callable[[socket.socket], object]
) -> None:
    """Run the first here, and the second in a process of its own, forked before CUDA begins."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        second(theirs)
    theirs.close()
    first(ours)
