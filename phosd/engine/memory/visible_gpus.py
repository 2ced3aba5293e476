"""Map the devices that a process sees to the GPUs of the node."""

from collections import Counter
from collections.abc import Mapping, Sequence

from phosd.engine.hook_client.link import BlockFlag, HookBlock, HookLink
from phosd.engine.image.manifest import CHUNK
from phosd.errors import Internal, Reason, Unsupported


class VisibleGpus:
    """Map the devices that each process of a group sees to the node's ordinals.

    ``gpus_of`` has the ordinals by pid, in the order in which the process numbers its devices.
    """

    def __init__(self, gpus_of: Mapping[int, Sequence[int]]) -> None:
        self._gpus_of = {pid: tuple(gpus) for pid, gpus in gpus_of.items()}

    def of(self, pid: int) -> tuple[int, ...]:
        """Return the node's ordinals of the devices that a process sees."""
        return self._gpus_of[pid]

    def of_block(self, pid: int, block: HookBlock) -> int:
        """Return the node's ordinal of the block's GPU. Raises if the block is on none.

        Words of events are in host memory; the hook names a device that reaches them.
        """
        if block.flags & BlockFlag.HOST_LOCATED and block.device < 0:
            raise Unsupported(
                f"process {pid} has VMM memory in host RAM (block {block.id})",
                hint="use mode driver",
                reason=Reason.HOST_MEMORY,
            )
        gpus = self._gpus_of[pid]
        if not 0 <= block.device < len(gpus):
            raise Internal(
                f"process {pid} has memory on device {block.device}, but sees {len(gpus)}",
                hint="the hook and phosd disagree; use mode driver, and report this",
            )
        return gpus[block.device]

    def chunks(self, links: Sequence[HookLink]) -> Counter[int]:
        """Count the chunks of the processes on each GPU. The processes may run."""
        chunks: Counter[int] = Counter()
        for link in links:
            for block in link.list_blocks():
                chunks[self.of_block(link.pid, block)] += -(-block.size // CHUNK)
        return chunks

    def move(self, moves: Mapping[int, int]) -> None:
        """Note that the driver has moved the processes: ``moves`` maps old ordinals to new ones."""
        self._gpus_of = {
            pid: tuple(moves.get(gpu, gpu) for gpu in gpus) for pid, gpus in self._gpus_of.items()
        }
