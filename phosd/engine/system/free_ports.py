"""Choose TCP ports that nobody has, for sockets that others will bind in a moment.

They are none that the kernel gives to whoever connects or asks for any port, so that hardly anybody
takes one in that moment.
"""

import contextlib
import errno
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from phosd.errors import Busy

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 20_000, 65_535
_ENOUGH = 1000
"""Ports that are to be left to choose from; else those of the kernel are taken, too."""
_TRIES = 500
_taken: set[int] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Yield a port that no socket of this network has, and that no other context has been given.

    Raises :class:`Busy` if none is found.
    """
    port = _choose()
    try:
        yield port
    finally:
        with _lock:
            _taken.discard(port)


def _choose() -> int:
    candidates = _candidates()
    with _lock:
        for port in random.sample(candidates, min(_TRIES, len(candidates))):
            if port not in _taken and _is_free(port):
                _taken.add(port)
                return port
    raise Busy(
        f"none of {_TRIES} TCP ports from {_LOWEST} on is free",
        hint="end programs that listen on many (`ss -tln`), and try again",
    )


def _candidates() -> list[int]:
    low, high = map(int, _RANGE.read_text().split())
    every = range(_LOWEST, _HIGHEST + 1)
    found = [port for port in every if not low <= port <= high]
    return found if len(found) >= _ENOUGH else [*every]


def _is_free(port: int) -> bool:
    """Return whether the port can be bound at every address, also where an ended connection is."""
    return _binds(socket.AF_INET, "0.0.0.0", port) and _binds(socket.AF_INET6, "::", port)


def _binds(family: socket.AddressFamily, host: str, port: int) -> bool:
    try:
        with socket.socket(family) as trial:
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            trial.bind((host, port))
    except OSError as error:
        return error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # there is no such family
    return True
