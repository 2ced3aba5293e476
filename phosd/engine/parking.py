"""Parking: processes let go of their device memory while the driver and CRIU save the rest."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from phosd.engine.errors import PhosError
from phosd.engine.faults import Point, point
from phosd.engine.holdings import Held, Holdings, if_alive
from phosd.engine.hooklink import HookLink, HookState
from phosd.engine.mover import Mover
from phosd.engine.progress import Progress
from phosd.engine.undo import Undo


@contextlib.contextmanager
def parked(links: Sequence[HookLink], holdings: Holdings) -> Iterator[None]:
    """Inside, the processes hold none of their memory and their hooks are detached.

    After it every process has its memory at the same addresses again. The hooks must be awake by
    then, that is, the processes running.
    """
    with Undo() as undo:
        for link in links:
            undo.add(_give_back, link, holdings.of(link.pid))
            point(Point.HOOK_PARK)
            link.park()
        with detached(links):
            yield


@contextlib.contextmanager
def detached(links: Sequence[HookLink]) -> Iterator[None]:
    """Inside, the hooks hold no socket, so that CRIU meets none; after it they are connected."""
    with Undo() as undo:
        for link in links:
            undo.add(_connected, link)
            point(Point.HOOK_DETACH)
            link.detach()
        yield


def _connected(link: HookLink) -> None:
    """Also where only the answer to a request was lost, so that nobody knows if it was done."""
    if not link.connected:
        link.reattach()


def _give_back(link: HookLink, held: Sequence[Held]) -> None:
    _connected(link)
    if link.hello().state is HookState.PARKED:
        link.unpark((h.block.id, h.descriptor) for h in held)


@contextlib.contextmanager
def room_kept(movers: Iterable[Mover], progress: Progress) -> Iterator[Callable[[], None]]:
    """Keeps for a checkpointed process the device memory that it will need again (hazard 19).

    A neighbour that takes it meanwhile would make the driver's restore fail for good. Call the
    function when the process has let go of its memory; at the end the memory is free for it.
    """
    before: list[tuple[Mover, int]] = []

    def give_up(mover: Mover, error: PhosError) -> None:
        progress.note(f"room for the program is not kept on GPU {mover.gpu}: {error}")

    for mover in movers:
        try:
            before.append((mover, mover.free_memory()[0]))
        except PhosError as error:  # it is dead; all that it had to save is saved
            give_up(mover, error)
    with Undo() as undo:

        def keep() -> None:
            for mover, free in before:
                try:
                    gained = mover.free_memory()[0] - free
                    if gained > 0:
                        undo.add(if_alive, mover, mover.unreserve)
                        mover.reserve(gained)
                except PhosError as error:
                    give_up(mover, error)

        yield keep
