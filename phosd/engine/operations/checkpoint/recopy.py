"""Checkpoint in mode ``recopy``: copy in passes while the program runs, the rest in the stop.

It guesses nothing: digests prove that the saved bytes are those of the stop.
"""

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.image.manifest import Block
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.parking import parked
from phosd.engine.memory.precopy import Precopy
from phosd.engine.operations.checkpoint.attempt import Attempt
from phosd.engine.operations.move_checks import require_alone_if_long


def recopy(attempt: Attempt) -> tuple[Block, ...]:
    """Save the group's device memory as of the stop; return its blocks."""
    group, progress = attempt.group, attempt.progress
    with (
        attempt.node.kept_memory.of(group) as memory,
        MemoryDump(memory, group.links, attempt.writer) as dump,
    ):
        gpus = memory.gpus.chunks(group.links)
        incremental = bool(attempt.options.parent)
        with (
            attempt.node.movers.turn_to_copy(gpus, progress),
            Precopy(dump, incremental=incremental) as copies,
        ):
            dump.make_packs()
            dump.wait_until_pinned(progress)
            copies.while_running(progress, interruptible=group.interruptible())
            attempt.cpu.prepare(group.trees)
            progress.phase("quiesce", stopped=True)
            point(Point.CHECKPOINT_QUIESCE)
            with closed_gates(group.links, progress, attempt.options.deadline) as long_kernels:
                require_alone_if_long(group, long_kernels=long_kernels)
                memory.take_all(group.links)
                group.require_no_sharers(memory.shared())
                blocks = memory.all()
                progress.phase("park", stopped=True)
                point(Point.CHECKPOINT_PARK)
                with parked(group.links, memory):
                    copies.begin_rest()
                    attempt.save_processes(memory.movers(), shared=memory.shared())
                    chunks = copies.finish_rest()
                memory.watchers.watch_all(group.links)
            progress.finish()
    return attempt.blocks(blocks, chunks)
