"""Choose where the device memory of a suspended program is kept."""

import logging
from collections.abc import Iterator

from phosd.engine.image.store import Store
from phosd.engine.node.node import Node
from phosd.engine.system.host_memory import available_memory
from phosd.errors import NotAuthorized, OutOfSpace
from phosd.units import human_bytes

PLACES = ("memory", "disk")
_SPARE = 1 / 16
"""The share of the available host memory that stays free: the kernel's figure is an estimate."""
_log = logging.getLogger(__name__)


def shelves(node: Node, wanted: str) -> Iterator[tuple[str, Store]]:
    """Yield the shelves that may do, the faster one first, each with its place. Where none can be
    mounted or made is logged, or raised if nothing else is ``wanted``.
    """
    for where in PLACES if wanted == "auto" else (wanted,):
        try:
            shelf = node.suspend_store.shelf(where)
        except (NotAuthorized, OutOfSpace) as error:
            if where == wanted:
                raise
            _log.warning("nothing is suspended to %s: %s", where, error)
        else:
            yield where, shelf


def place_for(node: Node, wanted: str, size: int, contexts: int) -> str:
    """Choose where to save ``size`` bytes of device memory, beside the bytes of ``contexts`` that
    the driver saves in host memory. Raises :class:`OutOfSpace`.
    """
    for where, shelf in shelves(node, wanted):
        if size <= room_on(shelf, where, contexts):
            return where
    raise OutOfSpace(
        f"there is no room for {human_bytes(size)} of device memory"
        f" {'in memory or on the disk' if wanted == 'auto' else f'({wanted})'}",
        hint="free host memory, delete images (`phos rm`), or migrate it instead",
    )


def room_on(shelf: Store, where: str, contexts: int) -> int:
    """Return the bytes that a shelf has room for, beside the bytes of ``contexts`` that the driver
    saves in host memory.
    """
    free = shelf.free_bytes()
    available = int(available_memory() * (1 - _SPARE))
    return min(free, available - contexts) if where == "memory" else free


def taken_by(node: Node, owner: int, but: str = "") -> int:
    """Return the bytes of a user's images and suspended programs, without the suspended one with
    the image ``but``.
    """
    return node.store.taken(owner) + node.suspend_store.taken(owner, but)
