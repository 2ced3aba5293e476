"""Freeze a hollow program as a whole, and let it run again (docs/design/protocols.md, Hollow)."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from phosd.engine.faults import Point, point
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.system.freezer import await_thawed
from phosd.engine.system.procfs import ProcessId
from phosd.errors import PhosError

_log = logging.getLogger(__name__)


def freeze(node: Node, image: str, processes: Collection[ProcessId]) -> None:
    """Freeze the processes of a program, and all below them, in the cgroups of its image. Raises
    what :meth:`Freezer.freeze` raises; :meth:`Freezer.dissolve` undoes what was done of it.
    """
    point(Point.FREEZE_BEGIN)
    node.freezer.gather(image, processes)
    point(Point.FREEZE_MOVED)
    node.freezer.freeze(image, processes)
    point(Point.FREEZE_END)


@contextmanager
def thawing(node: Node, suspended: Suspended) -> Iterator[Callable[[], None]]:
    """Yield a function that lets a program run, if it is frozen, and raises :class:`Busy` if others
    have frozen it, too. After the context it is frozen again if it is still hollow; if not, its
    processes are where they were before. Raises :class:`Busy` at once, too.
    """
    thawed = False
    if suspended.hollow:
        await_thawed(suspended.pids)

    def thaw() -> None:
        nonlocal thawed
        if node.freezer.thaw(suspended.pids):
            thawed = True
            point(Point.FREEZE_THAWED)

    try:
        yield thaw
    finally:
        if thawed:
            _settle(node, suspended)


def _settle(node: Node, suspended: Suspended) -> None:
    """Freeze a program again, or let it go. What fails is told in the log: the program is what its
    file says all the same, only not frozen, or in a cgroup of its own.
    """
    try:
        entry = node.suspended.find(suspended.pid)
        if entry is not None and entry.hollow:
            node.freezer.freeze(suspended.image, suspended.roots)
            return
        point(Point.FREEZE_LEAVE)
        node.freezer.dissolve(suspended.image)
    except (PhosError, OSError) as error:
        _log.error("hollow process %d is not frozen: %s", suspended.pid, error)
        node.freezer.dissolve(suspended.image)
