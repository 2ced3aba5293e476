"""Checkpoint in mode ``stop``: copy all memory while the gates are closed, then park it."""

from contextlib import ExitStack

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.image.manifest import Block
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.exported import distinct
from phosd.engine.memory.parking import parked
from phosd.engine.operations.checkpoint.attempt import Attempt
from phosd.engine.operations.move_checks import require_alone_if_long


def stop(attempt: Attempt) -> tuple[Block, ...]:
    """Save the group's device memory inside the stop; return its blocks."""
    group, progress = attempt.group, attempt.progress
    with (
        attempt.node.kept_memory.of(group) as memory,
        ExitStack() as turn,
        MemoryDump(memory, group.links, attempt.writer) as dump,
    ):
        gpus = memory.gpus.chunks(group.links)
        memory.take(group.links)
        turn.enter_context(attempt.node.movers.turn_to_copy(gpus, progress))
        dump.make_packs()
        attempt.cpu.prepare(group.trees)
        dump.wait_until_pinned(progress)
        progress.check()
        progress.phase("quiesce", stopped=True)
        point(Point.CHECKPOINT_QUIESCE)
        with closed_gates(group.links, progress, attempt.options.deadline) as long_kernels:
            require_alone_if_long(group, long_kernels=long_kernels)
            memory.take_all(group.links)
            group.require_no_sharers(memory.shared())
            progress.phase("digest", stopped=True)
            point(Point.CHECKPOINT_DIGEST)
            blocks = memory.all()
            digests = memory.adopted.digest(blocks)
            total = sum(exported.block.size for exported in distinct(blocks))
            progress.phase("drain", stopped=True, bytes_total=total)
            point(Point.CHECKPOINT_DRAIN)
            chunks = dump.save(digests, progress)
            turn.close()
            progress.phase("park", stopped=True)
            point(Point.CHECKPOINT_PARK)
            with parked(group.links, memory):
                attempt.save_processes(
                    memory.movers(),
                    shared=memory.shared(),
                    blocks=lambda: attempt.blocks(blocks, chunks),
                )
            memory.watchers.watch_all(group.links)
        progress.finish()
    return attempt.blocks(blocks, chunks)
