"""Mode ``concurrent``: the stop parks the data, and they are copied while the program runs.

From before the gate opens the hook saves what the program is about to overwrite (copy-on-write).
"""

from phosd.engine.checkpoint.attempt import Attempt
from phosd.engine.drain import Drain
from phosd.engine.faults import Point, point
from phosd.engine.gate import closed_gates
from phosd.engine.image.manifest import Block
from phosd.engine.parking import parked


def concurrent(attempt: Attempt) -> tuple[Block, ...]:
    """The unit's device memory as it was at the stop.

    Raises :class:`~phosd.engine.errors.MisSpeculation` when the program wrote where nobody expected
    it.
    """
    unit, progress = attempt.unit, attempt.progress
    with attempt.node.held(unit) as holdings:
        try:
            holdings.prepare_packs(unit.links, attempt.writer)
            holdings.take(unit.links)
            with Drain(
                holdings,
                unit.links,
                attempt.writer,
                attempt.options.experience.suspects,
                audit=attempt.options.audit,
            ) as drain:
                drain.make_room(attempt.node.config.shadow_limit)
                attempt.cpu.prepare(unit.trees)
                progress.check()
                progress.phase("quiesce", stopped=True)
                point(Point.CHECKPOINT_QUIESCE)
                with closed_gates(unit.links, progress, attempt.options.deadline):
                    holdings.take_all(unit.links)
                    unit.require_no_sharers(holdings.shared())
                    blocks = holdings.all()
                    progress.phase("drain", stopped=True)
                    point(Point.CHECKPOINT_DIGEST)
                    drain.save_shared(progress)
                    progress.phase("park", stopped=True)
                    point(Point.CHECKPOINT_PARK)
                    with parked(unit.links, holdings):
                        drain.begin()
                        attempt.save_processes(holdings.movers())
                    drain.arm()
                progress.phase("drain", bytes_total=drain.bytes_total)
                point(Point.CHECKPOINT_DRAIN)
                chunks = drain.finish(progress)
        finally:
            holdings.unpin()
    return attempt.blocks(blocks, chunks)
