"""Mode ``driver``: the driver and CRIU save everything, memory included."""

from phosd.engine.checkpoint.attempt import Attempt
from phosd.engine.gate import closed_gates
from phosd.engine.gpus import used_by
from phosd.engine.image.manifest import Block
from phosd.engine.parking import detached


def by_driver(attempt: Attempt) -> tuple[Block, ...]:
    """Nothing for phosd to save: the blocks are in the processes that the driver saves."""
    unit, progress = attempt.unit, attempt.progress
    attempt.node.let_go(unit)
    gpus = {gpu for pid in unit.gpu_pids for gpu in used_by(pid)}
    movers = [attempt.node.mover(gpu) for gpu in sorted(gpus)]
    parked_before = [link for link in unit.links if link.has_imports()]
    if parked_before:  # the driver does not bring imported memory back (hazard 7)
        progress.phase("quiesce", stopped=True)
        with closed_gates(parked_before, progress, attempt.options.deadline):
            for link in parked_before:
                link.rehome()
    attempt.cpu.prepare(unit.trees)
    progress.phase("detach")
    with detached(unit.links):
        attempt.save_processes(movers)
    progress.finish()
    return ()
