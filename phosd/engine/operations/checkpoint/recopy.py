"""Mode ``recopy``: copied before the stop, again and again, and what is left inside it.

It guesses nothing: what is saved is proven by its digest to be what the stop found.
"""

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.image.manifest import Block
from phosd.engine.memory.parking import parked
from phosd.engine.memory.precopy import Precopy
from phosd.engine.operations.checkpoint.attempt import Attempt


def recopy(attempt: Attempt) -> tuple[Block, ...]:
    """The unit's device memory as it was at the stop."""
    unit, progress = attempt.unit, attempt.progress
    with attempt.node.kept_memory.held(unit) as holdings:
        try:
            gpus = holdings.prepare_packs(unit.links, attempt.writer)
            with (
                attempt.node.movers.turn_to_copy(gpus, progress),
                Precopy(holdings, unit.links, attempt.writer) as copies,
            ):
                copies.while_running(progress)
                attempt.cpu.prepare(unit.trees)
                progress.phase("quiesce", stopped=True)
                point(Point.CHECKPOINT_QUIESCE)
                with closed_gates(unit.links, progress, attempt.options.deadline):
                    holdings.take_all(unit.links)
                    unit.require_no_sharers(holdings.shared())
                    blocks = holdings.all()
                    progress.phase("park", stopped=True)
                    point(Point.CHECKPOINT_PARK)
                    with parked(unit.links, holdings):
                        copies.begin_rest()
                        attempt.save_processes(holdings.movers())
                        chunks = copies.finish_rest()
                    holdings.watch_all(unit.links)
                progress.finish()
        finally:
            holdings.unpin()
    return attempt.blocks(blocks, chunks)
