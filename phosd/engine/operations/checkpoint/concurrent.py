"""Checkpoint in mode ``concurrent``: save the parked memory while the program runs again.

If there is device memory for a snapshot, the blocks are copied there inside the stop. Otherwise the
hooks save, from before the gates open, what the program is about to overwrite (copy-on-write).
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.image.manifest import Block
from phosd.engine.memory.cow_drain import CowDrain
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.parking import parked
from phosd.engine.memory.snapshot import Snapshot
from phosd.engine.operations.checkpoint.attempt import Attempt
from phosd.engine.operations.move_checks import require_alone_if_long


def concurrent(attempt: Attempt) -> tuple[Block, ...]:
    """Save the group's device memory as of the stop; return its blocks.

    Raises :class:`~phosd.errors.MisSpeculation` if the program wrote chunks that the hook had not
    predicted.
    """
    group, progress = attempt.group, attempt.progress
    with (
        attempt.node.kept_memory.of(group) as memory,
        MemoryDump(memory, group.links, attempt.writer) as dump,
        ExitStack() as stack,
    ):
        gpus = memory.gpus.chunks(group.links)
        memory.take(group.links)
        stack.enter_context(attempt.node.movers.turn_to_copy(gpus, progress))
        with ThreadPoolExecutor(1) as beside:
            criu = beside.submit(attempt.cpu.prepare, group.trees)
            saving = _with_room(attempt, dump, stack)
            if criu.done():
                criu.result()
            dump.make_packs()  # not before: mapping device memory would wait for the pinning
            criu.result()
        if saving.keeps_waiting:
            dump.wait_until_pinned(progress)
        progress.check()
        dump.let_pinning_rest()
        progress.phase("quiesce", stopped=True)
        point(Point.CHECKPOINT_QUIESCE)
        with closed_gates(group.links, progress, attempt.options.deadline) as long_kernels:
            require_alone_if_long(group, long_kernels=long_kernels)
            memory.take_all(group.links)
            group.require_no_sharers(memory.shared())
            blocks = memory.all()
            progress.phase("drain", stopped=True)
            point(Point.CHECKPOINT_DIGEST)
            saving.settle(progress)
            progress.phase("park", stopped=True)
            point(Point.CHECKPOINT_PARK)
            with parked(group.links, memory):
                saving.begin()
                attempt.save_processes(memory.movers(), shared=memory.shared(), beside=saving.copy)
            saving.arm()
        dump.go_on_pinning()
        progress.phase("drain", bytes_total=saving.bytes_total)
        point(Point.CHECKPOINT_DRAIN)
        chunks = saving.finish(progress)
    return attempt.blocks(blocks, chunks)


def _with_room(attempt: Attempt, dump: MemoryDump, stack: ExitStack) -> Snapshot | CowDrain:
    """Take device memory for a snapshot, or else for shadows; ``stack`` frees it."""
    node, options = attempt.node, attempt.options
    limit = node.config.shadow_limit

    def turn(gpus: Collection[int]) -> AbstractContextManager[None]:
        return node.gpu_locks.locked(gpus, attempt.progress, options.deadline)

    if node.config.snapshots:
        snapshot = stack.enter_context(Snapshot(dump, turn, limit))
        if snapshot.make_room():
            return snapshot
    drain = stack.enter_context(CowDrain(dump, options.experience.suspects, audit=options.audit))
    with turn({exported.gpu for exported in dump.memory.all()}):
        drain.make_room(limit)
    return drain
