"""Plan the evacuation of a GPU: policy, nothing is touched here."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phosd.engine.program.process import GpuProcess


class Fate(enum.StrEnum):
    """What is to be done with a process."""

    MIGRATE = "migrate"
    SUSPEND = "suspend"
    STAY = "stay"


@dataclass(frozen=True)
class Tenant:
    """A process, and how many bytes of device memory it has on the GPU."""

    process: GpuProcess
    bytes: int


@dataclass(frozen=True)
class GpuCapacity:
    """One GPU of the node: its ordinal, its chip, and how many bytes of its memory are free."""

    gpu: int
    chip: str
    free: int


@dataclass(frozen=True)
class Step:
    """What is to be done with one process, and ``why``; ``to`` is the GPU that it migrates to."""

    tenant: Tenant
    fate: Fate
    why: str
    to: int | None = None


def plan(
    gpu: int, tenants: Iterable[Tenant], capacities: Sequence[GpuCapacity], context: int
) -> list[Step]:
    """One step for each process on GPU ``gpu``, in the order in which they are to be done.

    The largest comes first, to the GPU of the same chip that has most memory free; ``context`` is
    what the driver needs there besides, in bytes. What fits nowhere is suspended, and what cannot
    be moved stays. Two of a process's GPUs never become one. Processes that share memory move with
    the first of them; the engine sees that, and whether the memory does suffice.
    """
    chip = next((each.chip for each in capacities if each.gpu == gpu), None)
    free = {each.gpu: each.free for each in capacities if each.gpu != gpu and each.chip == chip}
    steps = []
    for tenant in sorted(tenants, key=lambda t: (-t.bytes, t.process.pid)):
        process, needed = tenant.process, tenant.bytes + context
        if obstacle := _obstacle(process):
            steps.append(Step(tenant, Fate.STAY, obstacle))
            continue
        fits = [n for n, size in free.items() if n not in process.gpus and size >= needed]
        if not fits:
            why = "no other GPU of this chip has room for it" if free else "no other GPU is alike"
            steps.append(Step(tenant, Fate.SUSPEND, why))
            continue
        to = max(fits, key=lambda n: (free[n], -n))
        steps.append(Step(tenant, Fate.MIGRATE, f"GPU {to} has most memory free", to))
        free[to] -= needed
    return steps


def _obstacle(process: GpuProcess) -> str:
    """Why a process can be neither moved nor suspended; nothing when it can."""
    if process.hook_state != "hooked":
        return process.reason or "it was not started with `phos run`"
    if process.state != "running":
        return f"it is {process.state}" + (f": {process.reason}" if process.reason else "")
    return process.reason
