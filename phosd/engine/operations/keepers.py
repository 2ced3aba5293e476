"""Start the movers that keep device memory for a program while the driver has it."""

from collections.abc import Collection

from phosd.engine.job.progress import Progress
from phosd.engine.memory.reservation import require_room
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.gpus import list_gpus
from phosd.engine.node.node import Node
from phosd.errors import PhosError


def keepers(node: Node, gpus: Collection[int], progress: Progress) -> tuple[Mover, ...]:
    """Return the movers of these GPUs, which may take seconds to start. A GPU that is full, perhaps
    the reason for the suspension, may have no room for one; raises :class:`OutOfMemory` if it has
    none for the driver either.
    """
    found = []
    node.movers.begin(gpus)
    for gpu in sorted(gpus):
        try:
            found.append(node.movers.mover(gpu))
        except PhosError as error:
            for known in list_gpus():
                if known.ordinal == gpu and known.memory_used is not None:
                    require_room(gpu, known.memory_total - known.memory_used)
            progress.note(f"no device memory could be reserved on GPU {gpu}: {error}")
    return tuple(found)
