"""Suspend a program: free its GPUs while its processes stay (docs/design/protocols.md, Suspend).

Its device memory is saved in host memory or on the disk, and the driver saves the rest in the
process. :mod:`phosd.engine.operations.resume` undoes this.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import DEADLINE, Deadline, close_gates
from phosd.engine.image.manifest import Block, ChunkRef, Manifest
from phosd.engine.image.quota import require_suspendable
from phosd.engine.image.store import Store
from phosd.engine.image.writer import ImageWriter
from phosd.engine.job.progress import Beside, Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.exported import ExportedBlock, distinct, if_alive
from phosd.engine.memory.parking import detach, own_again, park
from phosd.engine.memory.reservation import Reservation
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import (
    UNLIMITED,
    DiskLimits,
    bytes_to_store,
    context_bytes,
    require_host_memory,
)
from phosd.engine.operations.giving_back import giving_back
from phosd.engine.operations.hollow import sink
from phosd.engine.operations.keepers import keepers
from phosd.engine.operations.manifest_records import block_records
from phosd.engine.operations.move_checks import claimed, device_needs, may_park
from phosd.engine.operations.permissions import ROOT
from phosd.engine.operations.pinned_shelf import keep_pinned
from phosd.engine.operations.ready import make_unready
from phosd.engine.operations.safe_points import SafePointChoices, SafePoints
from phosd.engine.operations.shelves import PLACES, place_for, room_on, taken_by
from phosd.engine.operations.standing_still import freeze
from phosd.engine.operations.suspended_records import entry_of, manifest_of
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.discovery import discover_group
from phosd.engine.program.group import CheckpointGroup, explain_death
from phosd.engine.program.kept_open import require_none_kept_open
from phosd.engine.system import procfs
from phosd.engine.system.slurm_steps import kept_thawed
from phosd.errors import InvalidOption, Reason, Unsupported
from phosd.interface import move_options as stated

if TYPE_CHECKING:  # callers may have read the word somewhere, and msgspec checks it
    Where = str
else:
    Where = stated.Where


class SuspendChoices(SafePointChoices, frozen=True, forbid_unknown_fields=True):
    """Options of a suspension that users may set.

    ``where``: ``memory``, ``disk``, or ``auto``: memory if it has room. ``deadline``: the seconds
    within which the program must reach the gate and its work must end. ``thaw``: a Slurm step
    that is frozen meanwhile is thawed, and stays so: whoever asks for it stops the program.
    ``hollow``: its contexts stay on the GPUs, so that it is resumed sooner; it is frozen meanwhile.
    """

    where: Where = "auto"
    deadline: Deadline = DEADLINE
    thaw: bool = False
    hollow: bool = False


class SuspendOptions(SuspendChoices, frozen=True):
    """Options of a suspension: the user's, and those that phosd adds."""

    caller: int = ROOT
    """The user id that requested it. Only root may suspend processes of other users."""
    limits: DiskLimits = UNLIMITED
    instead_of: Suspended | None = None
    """The suspended program that is resumed next, whose bytes its owner has again then."""
    leave: bool = True
    """Whether phosd also ends its movers on these GPUs, unless they have other work."""
    pin: bool = True
    """Whether what a hollow program has in host memory is pinned at the end."""
    by_runtime: bool = False
    """Whether a container's runtime saves the program meanwhile, and may make it again with other
    pids (``runtime_checkpoint.py``).
    """


def suspend(node: Node, pid: int, options: SuspendOptions, progress: Progress) -> Suspended:
    """Suspend the tree of ``pid`` and all processes that share device memory with it. What a hollow
    program still has on its GPUs leaves them.

    If anything fails before the program is recorded as suspended, it runs on.
    """
    _require_place(options.where)
    progress.phase("prepare")
    known = node.suspended.find(pid)
    with ExitStack() as job:
        if options.thaw:
            job.enter_context(kept_thawed(pid))
        if known is not None and (lower := _lowered(node, known, options, progress)):
            return lower
        check = claimed(node, job, options.caller)
        group = job.enter_context(discover_group(pid, node.config.runtime_dir, check))
        if options.by_runtime:
            require_what_a_runtime_saves(group)
        parks = may_park(group, "auto", progress)
        needs = device_needs(group, parks=parks)
        if options.hollow:
            _require_parked(group)
        contexts = 0 if options.hollow else context_bytes() * len(group.users)
        require_host_memory(contexts if parks else sum(needs.values()))
        kept = () if options.hollow else keepers(node, needs, progress)
        size = bytes_to_store(node, group) if parks else 0
        where, shelf, writer = _begin(node, job, group.owner, options, size, contexts)
        if options.hollow:
            job.enter_context(node.freezer.made(writer.id, group.living))
        progress.check()
        progress.about_to_touch(group.affected)
        job.enter_context(explain_death(group, "suspension"))
        points = SafePoints(group, options, node.config.callback_deadline, progress)
        job.enter_context(points.reached())
        if not parks:
            node.kept_memory.let_go(group)
        with node.kept_memory.of(group) as memory, Undo() as undo:
            suspension = _Suspension(node, group, options, progress, undo, kept)
            if parks:
                reservation, blocks = _parked(suspension, MemoryDump(memory, group.links, writer))
            else:
                reservation, blocks = _by_driver(suspension), ()
            progress.phase("publish", stopped=True)
            point(Point.SUSPEND_PUBLISH)
            manifest = manifest_of(
                *(writer, group, group.trees, needs, blocks),
                parked=parks,
                own_ids=options.by_runtime,
            )
            writer.publish(manifest)
            undo.add(shelf.delete, manifest.id)
            if options.hollow:
                undo.add(node.freezer.dissolve, manifest.id)
                freeze(node, manifest.id, group.living.values())
            suspended = suspension.recorded(manifest, where, needs)
            movers = memory.movers()
            if options.by_runtime:
                detach(group.links, undo)
            undo.forget()
        suspension.release(reservation, movers, needs)
        if options.hollow and options.pin:
            keep_pinned(node, suspended)
        progress.finish()
        return suspended


@dataclass(frozen=True)
class _Suspension:
    """One suspension of ``group``: the steps that stop it, and ``undo`` to let it run again."""

    node: Node
    group: CheckpointGroup
    options: SuspendOptions
    progress: Progress
    undo: Undo
    keepers: tuple[Mover, ...]
    """Movers of the GPUs that the group uses."""

    def stop(
        self, movers: Iterable[Mover], limit: float | None, bytes_total: int = 0
    ) -> Reservation:
        """Let the driver checkpoint the processes. The keepers, and ``movers``, which have blocks
        of the group, reserve the freed memory. ``bytes_total`` are being saved meanwhile.
        """
        self.progress.phase("control", stopped=True, bytes_total=bytes_total)
        point(Point.SUSPEND_CONTROL)
        reservation = self._reservation(movers, limit)
        driver_checkpoint.stop(self.group.gpu_pids, reservation, self.undo)
        return reservation

    def stop_threads(self) -> Reservation:
        """Do :meth:`stop`, and keep all threads of the processes stopped: no closed gate keeps them
        out of the driver while it has their memory (hazard 38).
        """
        self.progress.phase("control", stopped=True)
        point(Point.SUSPEND_CONTROL)
        pids, stopped = self.group.gpu_pids, self.node.stopped
        reservation = self._reservation((), None)
        self.undo.add(reservation.end)
        self.undo.add(stopped.bring_back, pids)
        self.undo.add(reservation.claim_back)
        driver_checkpoint.lock_in_turn(pids, reservation)
        with stopped.stopping(driver_checkpoint.restore_threads(pids)):
            self.progress.check()
            driver_checkpoint.checkpoint_all(pids, reservation)
        return reservation

    def recorded(self, manifest: Manifest, where: str, device_bytes: dict[int, int]) -> Suspended:
        """Write the entry of the suspended program, from which on it counts as suspended. Raises
        :class:`NoSuchProcess` if it has ended.
        """
        by_runtime, hollow = self.options.by_runtime, self.options.hollow
        form = self.node.suspend_store.format_for(where, with_pids=by_runtime, hollow=hollow)
        suspended = entry_of(
            *(manifest, self.group, where, device_bytes, form), by_runtime=by_runtime, hollow=hollow
        )
        suspended.require_alive()
        self.undo.add(self.node.suspended.remove, suspended)
        self.node.suspended.write(suspended)
        return suspended

    def release(
        self, reservation: Reservation | None, movers: Iterable[Mover], needs: dict[int, int]
    ) -> None:
        """Give back what the suspended program had on its GPUs; ``movers`` guard its memory."""
        node, group = self.node, self.group
        # Blocks kept beyond this would be mistaken for blocks that the program makes later.
        with giving_back(self.progress, node.kept_memory.letting_go(group)) as last_first:
            if self.options.leave and not self.options.hollow:
                last_first.add(node.movers.leave, needs, group.pids)
            for mover in movers:
                last_first.add(if_alive, mover, partial(mover.unguard, group.process_ids))
            if reservation is not None:
                last_first.add(reservation.release)

    def _reservation(self, movers: Iterable[Mover], limit: float | None) -> Reservation:
        return Reservation(
            self.node.gpu_locks,
            (*self.keepers, *movers),
            self.group.process_ids,
            self.progress,
            limit,
        )


def _parked(
    suspension: _Suspension, dump: MemoryDump
) -> tuple[Reservation | None, tuple[Block, ...]]:
    """Park the memory of the stopped program; save it, and have the driver save the rest beside,
    unless the program is to be hollow.
    """
    group, progress, memory = suspension.group, suspension.progress, dump.memory
    deadline = suspension.options.deadline
    memory.take(group.links)
    with suspension.node.movers.turn_to_copy({mover.gpu for mover in memory.movers()}, progress):
        progress.phase("quiesce", stopped=True)
        point(Point.SUSPEND_QUIESCE)
        close_gates(group.links, progress, deadline, suspension.undo)
        memory.take_all(group.links)
        group.require_complete(memory.shared())
        exported = memory.all()
        progress.phase("park", stopped=True)
        point(Point.SUSPEND_PARK)
        park(group.links, memory, suspension.undo)
        require_none_kept_open(group.living, memory.shared())
        size = sum(h.block.size for h in distinct(exported))
        with _saved_beside(dump, exported, progress) as saving:
            reservation, left = None, size
            if not suspension.options.hollow:
                reservation = suspension.stop(memory.movers(), deadline, size)
                left -= progress.phases[-1].bytes_done
            progress.phase("save", stopped=True, bytes_total=left)
            point(Point.SUSPEND_SAVE)
            chunks = saving.result()
            progress.check()  # nobody may have looked, as little was to be saved
    return reservation, block_records(group.trees, exported, chunks)


@contextmanager
def _saved_beside(
    dump: MemoryDump, exported: Sequence[ExportedBlock], progress: Progress
) -> Iterator[Future[dict[int, tuple[ChunkRef, ...]]]]:
    """Hash and save the parked memory on another thread, which has ended after the context: an
    error that ends that cancels it.
    """
    part = Beside(progress)
    with ThreadPoolExecutor(1) as beside:
        try:
            yield beside.submit(lambda: dump.save(dump.memory.adopted.digest(exported), part))
        except BaseException:
            part.cancel()
            raise


def _by_driver(suspension: _Suspension) -> Reservation:
    """Let the driver save everything, device memory included, in the process."""
    own_again(suspension.group.links, suspension.progress, suspension.options.deadline)
    return suspension.stop_threads()


def _require_parked(group: CheckpointGroup) -> None:
    if why_not := group.why_not_parked():
        raise Unsupported(
            f"its contexts cannot stay on the GPUs: {why_not}",
            hint="suspend it without `hollow`, and the driver saves all of it",
            reason=why_not.reason,
        )


def _lowered(
    node: Node, known: Suspended, options: SuspendOptions, progress: Progress
) -> Suspended | None:
    """Bring a suspended program to a lower level, if it is on a higher one: from ready to hollow,
    or to suspended.
    """
    if options.hollow and known.image in node.readied.images():
        make_unready(node, known, options.caller, progress)
        return known
    if known.hollow and not (options.hollow or options.by_runtime):
        return sink(node, known, options.caller, progress, leave=options.leave)
    return None


def _require_place(where: str) -> None:
    if where not in ("auto", *PLACES):
        raise InvalidOption(
            f"device memory cannot be kept in {where!r}", hint="give auto, memory or disk"
        )


def _begin(
    node: Node, job: ExitStack, owner: int, options: SuspendOptions, size: int, contexts: int
) -> tuple[str, Store, ImageWriter]:
    """Begin the image where there is room for ``size`` bytes (:func:`place_for`), as far as the
    owner's quota goes. It may take more if there is room. Returns where, the store and the image.
    """
    where = place_for(node, options.where, size, contexts)
    shelf = node.suspend_store.shelf(where)
    going = options.instead_of.image if options.instead_of is not None else ""
    quota, before = options.limits.quota(owner), taken_by(node, owner, but=going)
    writer = job.enter_context(shelf.begin(owner))
    writer.limit(room_on(shelf, where, contexts))
    writer.reserve(size)
    if quota is not None:
        require_suspendable(quota, owner, size, before)
    job.callback(shelf.spares.drop)
    shelf.spares.preallocate(size)
    return where, shelf, writer


def require_what_a_runtime_saves(group: CheckpointGroup) -> None:
    """Raise :class:`Unsupported` if the program cannot be parked, or has processes outside of its
    container.
    """
    if why_not := group.why_not_parked():
        raise Unsupported(
            f"a runtime's checkpoint is not possible: {why_not}",
            hint="start the container with phosd's hook (`phos setup-container-runtime --help`)",
            reason=why_not.reason,
        )
    if len(group.trees) > 1:
        raise Unsupported(
            f"{procfs.describe(group.trees[1].root.pid)} shares device memory with "
            f"{procfs.describe(group.trees[0].root.pid)}, which a container's runtime saves alone",
            hint="start both in one container",
            reason=Reason.SHARED_MEMORY,
        )
