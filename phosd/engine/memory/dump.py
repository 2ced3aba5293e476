"""Save a group's device memory into an image: blocks, their destination, and the packs."""

from collections.abc import Sequence

from phosd.engine.hook_client.link import HookLink
from phosd.engine.image.manifest import ChunkRef
from phosd.engine.image.writer import ImageWriter, Pack
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo, Undoing
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import distinct, keys_by_gpu
from phosd.engine.memory.pack_pinning import PackPinning
from phosd.errors import NoSuchProcess, changed_in_the_stop


class MemoryDump(Undoing):
    """Save the device memory of the processes with the hooks ``links`` through ``writer``.

    Leaving its context unpins the packs.
    """

    def __init__(
        self, memory: DeviceMemory, links: Sequence[HookLink], writer: ImageWriter
    ) -> None:
        self.memory = memory
        self.links = links
        self.writer = writer
        self._packs: dict[int, list[Pack]] = {}
        self._pinning: list[PackPinning] = []
        self._undo = Undo()

    def make_packs(self) -> None:
        """Make packs for what has to be stored of the processes' blocks, while they still run, and
        begin to pin them. Call it with a turn to copy: it may be as much host memory as the
        processes have device memory. More packs are made later if these are not enough.
        """
        for gpu, count in self.memory.chunks_to_store(self.links).items():
            packs = self._packs[gpu] = self.writer.packs(count)
            mover, keep = self.memory.adopted.mover(gpu), self.writer.tier.keeps_packs
            pinning = PackPinning(mover, packs, keep=keep)
            self._pinning.append(pinning)
            self._undo.add(pinning.end)

    def wait_until_pinned(self, progress: Progress) -> None:
        """Wait until all packs are pinned: for who copies while somebody waits. Others may write
        to packs that are not pinned yet, if more slowly. Raises :class:`Cancelled`.
        """
        for pinning in self._pinning:
            pinning.wait(progress)

    def let_pinning_rest(self) -> None:
        """Leave the cores of the host to the stop. Waits for what has begun."""
        for pinning in self._pinning:
            pinning.rest()

    def go_on_pinning(self) -> None:
        """Pin the other packs: the program runs again."""
        for pinning in self._pinning:
            pinning.go_on()

    def packs(self, gpu: int) -> list[Pack]:
        """Return the packs that are ready for a GPU's chunks; each may be used once."""
        return self._packs.pop(gpu, [])

    def save(
        self, digests: dict[int, list[bytes]], progress: Progress, *, prepared: bool = True
    ) -> dict[int, tuple[ChunkRef, ...]]:
        """Copy the blocks of ``digests`` into the image. Returns the chunks of each block, by key.

        Fills the ``prepared`` packs, or else new ones. Raises :class:`MisSpeculation` if the saved
        bytes differ from those that were hashed, and :class:`NoSuchProcess` if a process has ended,
        whose memory has gone with it.
        """
        chunks: dict[int, tuple[ChunkRef, ...]] = {}
        blocks = distinct(exported for exported in self.memory.all() if exported.key in digests)
        for gpu, keys in keys_by_gpu(blocks).items():
            wanted = {key: digests[key] for key in keys}
            packs = self.packs(gpu) if prepared else []
            saved = self.memory.adopted.mover(gpu).save(wanted, self.writer, progress, packs)
            if saved.changed:
                raise changed_in_the_stop(len(saved.changed), gpu)
            chunks |= saved.chunks
        if digests.keys() - chunks.keys():
            raise NoSuchProcess(
                "a process of the program has ended before its device memory was saved",
                hint="see the program's output for why it ended",
            )
        return chunks
