"""Choose TCP ports that nobody has, for sockets that others will bind in a moment.

They are none that the kernel gives to whoever connects or asks for any port, as long as it leaves
enough, so that hardly anybody takes one in that moment.
"""

import contextlib
import errno
import random
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from phosd.errors import Busy

_SETTINGS = Path("/proc/sys/net/ipv4")
_LOWEST, _HIGHEST = 20_000, 65_535
_NODE_PORTS = range(30_000, 32_768)
"""Ports that Kubernetes takes by rules of the firewall, without a socket, unless told otherwise."""
_ENOUGH = 1000
"""Ports that are to be left to choose from; else those of the kernel are taken, too."""
_TRIES = 500
_reserved: set[int] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def ports_for(
    wanted: Collection[int], taken: Callable[[], Collection[int]]
) -> Iterator[Mapping[int, int]]:
    """Yield for each port the one to bind: itself if nobody has it, else a free one. Until the
    context ends no other one is given any of them. ``taken`` tells which others have.

    Raises :class:`Busy` if none is found.
    """
    found: dict[int, int] = {}
    try:
        with _lock:
            others = {*taken(), *_reserved}
            for port in sorted(wanted):
                found[port] = _free_port() if port in others else port
                _reserved.add(found[port])
        yield found
    finally:
        with _lock:
            _reserved.difference_update(found.values())


def _free_port() -> int:
    """Return one that no socket of this network has, and that is not reserved."""
    candidates = _candidates()
    for port in random.sample(candidates, min(_TRIES, len(candidates))):
        if port not in _reserved and _is_free(port):
            return port
    raise Busy(
        f"none of {_TRIES} TCP ports from {_LOWEST} on is free",
        hint="end programs that listen on many (`ss -tln`), and try again",
    )


def _candidates() -> list[int]:
    low, high = map(int, (_SETTINGS / "ip_local_port_range").read_text().split())
    kept = {*_NODE_PORTS, *_ranges((_SETTINGS / "ip_local_reserved_ports").read_text())}
    every = [port for port in range(_LOWEST, _HIGHEST + 1) if port not in kept]
    found = [port for port in every if not low <= port <= high]
    return found if len(found) >= _ENOUGH else every


def _ranges(text: str) -> Iterator[int]:
    """Yield the numbers of ``8080,9000-9010``."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


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
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return True  # there is no such family here
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True
