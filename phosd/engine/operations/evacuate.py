"""Plan the evacuation of a GPU. Nothing is moved or suspended here."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phosd.engine.program.process import GpuProcess


class EvacuationOutcome(enum.StrEnum):
    """The action planned for a process."""

    MIGRATE = "migrate"
    SUSPEND = "suspend"
    STAY = "stay"


@dataclass(frozen=True)
class GpuUser:
    """A process and the device memory, in bytes, that it uses on the GPU."""

    process: GpuProcess
    bytes: int

    def may_get(self, gpu: int) -> bool:
        """Return whether it could use this GPU instead."""
        return gpu not in self.process.gpus and gpu not in self.process.unseen


@dataclass(frozen=True)
class GpuCapacity:
    """One GPU of the node: its ordinal, its chip and its free memory in bytes."""

    gpu: int
    chip: str
    free: int


@dataclass(frozen=True)
class Step:
    """The action planned for one process, and ``why``; ``to`` is the GPU that it migrates to."""

    user: GpuUser
    outcome: EvacuationOutcome
    why: str
    to: int | None = None


def plan(
    gpu: int, users: Iterable[GpuUser], capacities: Sequence[GpuCapacity], context: int
) -> list[Step]:
    """Return one step for each process on GPU ``gpu``, in the order of execution.

    The largest process comes first. It migrates to the GPU of the same chip with the most free
    memory; the driver needs ``context`` further bytes there. A process that fits nowhere is
    suspended, and one that cannot be moved stays. Two GPUs of one process are never mapped to the
    same GPU. Processes that share memory move with the first of them: the engine finds them, and
    checks whether there is memory for all.
    """
    chip = next((each.chip for each in capacities if each.gpu == gpu), None)
    free = {each.gpu: each.free for each in capacities if each.gpu != gpu and each.chip == chip}
    steps = []
    for user in sorted(users, key=lambda each: (-each.bytes, each.process.pid)):
        process, needed = user.process, user.bytes + context
        if process.away is not None and process.away.hollow:
            level = (
                "ready, so its memory is" if process.away.ready else "hollow, so its contexts are"
            )
            why = f"it is {level} there"
            steps.append(Step(user, EvacuationOutcome.SUSPEND, why))
            continue
        if obstacle := _obstacle(process):
            steps.append(Step(user, EvacuationOutcome.STAY, obstacle))
            continue
        fits = [n for n, size in free.items() if user.may_get(n) and size >= needed]
        if not fits:
            why = "no other GPU of this chip has room for it" if free else "no other GPU is alike"
            steps.append(Step(user, EvacuationOutcome.SUSPEND, why))
            continue
        to = max(fits, key=lambda n: (free[n], -n))
        steps.append(Step(user, EvacuationOutcome.MIGRATE, f"GPU {to} has most memory free", to))
        free[to] -= needed
    return steps


def _obstacle(process: GpuProcess) -> str:
    """Return why a process can be neither moved nor suspended; an empty text if it can."""
    if process.hook_state != "hooked":
        return process.reason or "it was not started with `phos run`"
    if process.state != "running":
        return f"it is {process.state}" + (f": {process.reason}" if process.reason else "")
    return process.reason
