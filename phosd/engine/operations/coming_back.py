"""What brings a suspended program back: its room, and what the driver has of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.affected import AffectedProcess, AffectedSet
from phosd.engine.memory.reservation import reserve_ahead
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.node import Node
from phosd.engine.node.placement import whole
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import require_device_memory
from phosd.engine.operations.move_checks import require_alone, require_shareable
from phosd.engine.operations.permissions import ROOT
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.process_gpus import visible_gpus
from phosd.engine.program.stopped import StoppedProcesses
from phosd.errors import NotAuthorized


def require_resumable(suspended: Suspended, caller: int) -> None:
    """Raise unless user ``caller`` may resume the program and all its processes live."""
    if caller not in (ROOT, suspended.owner):
        raise NotAuthorized(
            f"process {suspended.pid} belongs to uid {suspended.owner}, not to {caller}",
            hint="ask as root",
        )
    suspended.require_alive()


def hooked(manifest: Manifest) -> set[int]:
    """Return the pids of the processes that have a hook."""
    return {process.pid for process in manifest.processes if process.hooked}


def affected_by(
    suspended: Suspended, hooked: Collection[int], moves: Mapping[int, int]
) -> AffectedSet:
    """Return the GPU processes of the program, of which those in ``hooked`` have a hook, and the
    GPUs that it has after the ``moves``.
    """
    processes = (
        AffectedProcess(pid, start, gpu=True, hooked=pid in hooked)
        for pid, start in suspended.processes
    )
    gpus = sorted({moves.get(gpu, gpu) for gpu in suspended.gpus})
    return AffectedSet(tuple(processes), tuple(gpus))


def rest_reserved(
    node: Node, suspended: Suspended, needs: Mapping[int, int], blocks: Mapping[int, int]
) -> AbstractContextManager[Callable[[], None]]:
    """Reserve what the GPUs need beyond the blocks, until the function that it yields is called."""
    rest = {node.movers.mover(gpu): size - blocks.get(gpu, 0) for gpu, size in needs.items()}
    return reserve_ahead(rest, suspended.processes)


def require_room(
    node: Node,
    suspended: Suspended,
    manifest: Manifest,
    needs: dict[int, int],
    moves: Mapping[int, int],
) -> None:
    """Raise unless the GPUs have room, and processes can share memory there as they did."""
    require_device_memory(node, needs, "the program")
    if manifest.shares_memory:
        require_alone(needs, suspended.pids | node.suspended.hollow())
        if moves:
            there = {moves.get(gpu, gpu) for gpu in suspended.gpus}
            require_shareable({pid: visible_gpus(pid) for pid in suspended.pids}, there)


def back_from_driver(
    stopped: StoppedProcesses,
    suspended: Suspended,
    moves: dict[int, int],
    gpus: Sequence[GpuInfo],
) -> None:
    """Let the driver restore the processes that are still checkpointed, then resume the threads
    that phosd has stopped, all of them or none, then unlock.
    """
    with stopped.restore_threads_run(suspended.pids):
        states = {pid: driver_checkpoint.state(pid) for pid in suspended.pids}
        asleep = [pid for pid in states if states[pid] is driver_checkpoint.State.CHECKPOINTED]
        if moves:
            driver_checkpoint.move(asleep, whole(moves, len(gpus)))
        else:
            driver_checkpoint.restore_all(asleep)
    stopped.let_go(suspended.pids)
    driver_checkpoint.require_running(suspended.pids)
