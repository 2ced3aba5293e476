"""Migrate a program, which keeps its pid, to other GPUs (docs/design/protocols.md, Migrate).

Its memory is copied from GPU to GPU while it runs; what it wrote since is copied inside the stop.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import DEADLINE, Deadline, closed_gates
from phosd.engine.job.affected import AffectedSet
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.parking import detached, own_again, park
from phosd.engine.memory.reservation import Reservation, lent_room, reserve_ahead
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.gpus import GpuInfo, list_gpus
from phosd.engine.node.node import Node
from phosd.engine.node.placement import parse_moves, require_fit, whole
from phosd.engine.operations.admission import (
    context_bytes,
    require_device_memory,
    require_host_memory,
    require_room_elsewhere,
)
from phosd.engine.operations.move_checks import (
    claimed,
    device_needs,
    gpus_in_use,
    may_park,
    require_alone,
    require_alone_if_long,
    require_seen,
    require_shareable,
)
from phosd.engine.operations.permissions import ROOT
from phosd.engine.operations.replicas import Replicas
from phosd.engine.operations.safe_points import SafePointChoices, SafePoints
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.discovery import discover_group
from phosd.engine.program.group import CheckpointGroup, explain_death
from phosd.engine.program.held import held
from phosd.engine.program.kept_open import require_none_kept_open
from phosd.engine.program.locked import locked
from phosd.engine.program.process_gpus import gpus_of
from phosd.errors import InvalidOption, PhosError
from phosd.interface.move_options import MigrateMode

MODES: tuple[str, ...] = get_args(MigrateMode)
if TYPE_CHECKING:  # callers may have read the word somewhere, and msgspec checks it
    Mode = str
else:
    Mode = MigrateMode


class MigrateChoices(SafePointChoices, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a migration that users may set.

    ``mode``: ``precopy`` copies the memory before the stop; ``driver`` leaves everything to the
    driver, which needs no hook but stops the program for long; ``auto`` chooses. ``deadline``: the
    seconds within which the program must reach the gate and its work must end.
    """

    mode: Mode = "auto"
    deadline: Deadline = DEADLINE


class MigrateOptions(MigrateChoices, frozen=True):
    """Options of a migration. ``to`` is a GPU, or ``OLD:NEW`` for each one (``placement.py``)."""

    to: str
    caller: int = ROOT
    """The user id that requested it. Only root may move processes of other users."""


def migrate(node: Node, pid: int, options: MigrateOptions, progress: Progress) -> dict[int, int]:
    """Move the tree of ``pid``, and all processes that share device memory with it, to other GPUs.

    Returns the ordinal of each GPU that was left, with that of the new one. If anything fails
    before the driver has moved the processes, the program goes on where it was.
    """
    if options.mode not in MODES:
        raise InvalidOption(
            f"there is no mode {options.mode!r}", hint=f"modes are {', '.join(MODES)}"
        )
    progress.phase("prepare")
    with ExitStack() as job:
        group = job.enter_context(
            discover_group(pid, node.config.runtime_dir, claimed(node, job, options.caller))
        )
        gpus = list_gpus()
        used = gpus_in_use(group)
        moves = parse_moves(options.to, [*used], gpus)
        require_fit(moves, gpus)
        require_seen(group.gpu_pids, moves)
        require_room_elsewhere({*used, *moves.values()})
        parks = may_park(group, options.mode, progress)
        if group.shares_memory():
            require_alone({moves.get(gpu, gpu) for gpu in used}, group.pids)
        node.movers.begin({*moves, *moves.values()})
        _require_room(node, group, moves, parks=parks)
        affected = group.affected
        progress.about_to_touch(affected)
        job.enter_context(explain_death(group, "migration"))
        points = SafePoints(group, options, node.config.callback_deadline, progress)
        job.enter_context(points.reached())
        way = _by_precopy if parks else _by_driver
        way(_Move(node, group, affected, moves, gpus, options.deadline, progress))
        node.movers.leave(moves, group.pids)
        progress.finish()
        return moves


@dataclass(frozen=True)
class _Move:
    """One migration of ``group``; ``moves`` maps the GPUs that it leaves to the new ones."""

    node: Node
    group: CheckpointGroup
    affected: AffectedSet
    moves: dict[int, int]
    gpus: Sequence[GpuInfo]
    deadline: float
    progress: Progress

    def cross(
        self, move: Callable[[Sequence[int]], None], release: Callable[[], None] = lambda: None
    ) -> None:
        """Let the driver restore the processes on the new GPUs, all of them or none: with these
        GPUs to itself, as those that have arrived may have to leave again. ``release`` frees the
        memory reserved there, and is called just before.
        """
        self.progress.about_to_touch(replace(self.affected, moves=self.moves))
        point(Point.MIGRATE_MOVE)
        try:
            new = self.moves.values()
            with (
                self.node.gpu_locks.locked(new, self.progress, self.deadline),
                lent_room(self.node.movers.running(new)),
            ):
                release()
                move(whole(self.moves, len(self.gpus)))
        except PhosError:
            self.progress.about_to_touch(self.affected)
            raise

    def reservation(self, movers: Sequence[Mover], limit: float | None = None) -> Reservation:
        """Return a reservation by these movers, for a return to the old GPUs."""
        return Reservation(
            self.node.gpu_locks, movers, self.group.process_ids, self.progress, limit
        )

    @property
    def contexts(self) -> dict[Mover, int]:
        """The bytes that the mover of each new GPU keeps free for contexts."""
        size = context_bytes() * len(self.group.users)
        return {self.node.movers.mover(new): size for new in self.moves.values()}


def _by_precopy(move: _Move) -> None:
    group, progress = move.group, move.progress
    with (
        move.node.kept_memory.of(group) as memory,
        Replicas(move.node, memory, move.moves) as replicas,
        reserve_ahead(move.contexts, group.process_ids) as release,
    ):
        point(Point.MIGRATE_PRECOPY)
        replicas.while_running(group.links, progress, interruptible=group.interruptible())
        progress.check()
        progress.phase("quiesce", stopped=True)
        point(Point.MIGRATE_QUIESCE)
        with closed_gates(group.links, progress, move.deadline) as long_kernels:
            require_alone_if_long(group, long_kernels=long_kernels)
            memory.take_all(group.links)
            group.require_complete(memory.shared())
            _require_shareable(move, memory)
            replicas.follow()
            progress.phase("park", stopped=True)
            point(Point.MIGRATE_PARK)
            with Undo() as undo, ThreadPoolExecutor(1) as beside:
                rest = beside.submit(replicas.finish, Progress())
                park(group.links, memory, undo)
                require_none_kept_open(group.living, memory.shared())
                progress.phase("control", stopped=True)
                point(Point.MIGRATE_CONTROL)
                reservation = move.reservation(memory.movers(), move.deadline)
                with driver_checkpoint.checkpointed(group.gpu_pids, reservation) as bring:
                    rest.result()
                    replicas.guard()
                    move.cross(bring, release)
                    replicas.take_over()
                progress.phase("unpark", stopped=True)
                point(Point.MIGRATE_UNPARK)
        progress.phase("release")
        point(Point.MIGRATE_RELEASE)


def _require_shareable(move: _Move, memory: DeviceMemory) -> None:
    sharing = {exported.pid for exported in memory.shared()}
    if len(sharing) > 1:
        for link in move.group.links:
            if link.pid in sharing:
                seen = gpus_of(hello := link.hello())
                there = {move.moves.get(gpu, gpu) for gpu in seen}
                require_shareable({link.pid: () if hello.makes_memory else seen}, there)


def _by_driver(move: _Move) -> None:
    group, progress = move.group, move.progress
    move.node.kept_memory.let_go(group)
    own_again(group.links, progress, move.deadline)
    progress.phase("control", stopped=True)
    with detached(group.links):
        movers = [move.node.movers.mover(gpu) for gpu in sorted(move.moves)]
        with (
            locked(group.gpu_pids, move.reservation(movers)) as processes,
            held(processes.restore_threads),
            Undo() as undo,
        ):
            # Not unlocked before all threads run: one may have a lock that this takes.
            undo.add(processes.restore)
            processes.checkpoint()
            move.cross(processes.move)
    progress.phase("release")


def _require_room(
    node: Node, group: CheckpointGroup, moves: dict[int, int], *, parks: bool
) -> None:
    """Raise unless the new GPUs and host memory have room."""
    needs = device_needs(group, parks=parks)
    require_device_memory(node, {new: needs[old] for old, new in moves.items()}, "the program")
    contexts = context_bytes() * len(group.users)
    require_host_memory(contexts if parks else max(contexts, sum(needs.values())))
