"""Ask the movers of their GPUs to import and map a group's blocks (adopt them), and drop them."""

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import Allocation, ExportedBlock, distinct, keys_by_gpu, let_go
from phosd.engine.mover.client.mover import Mover


class MoverProvider(Protocol):
    """Provider of the data mover of a GPU, by the node's ordinal."""

    def mover(self, gpu: int) -> Mover:
        """Return the running mover of ``gpu``."""


class AdoptedBlocks:
    """Ask movers to adopt exported blocks, and to drop them once no process has them.

    Methods that change the blocks are called with ``lock`` held. It is the lock of the table of
    blocks, so a block that is released there is dropped here before anyone else sees the table.
    """

    def __init__(self, movers: MoverProvider, lock: threading.RLock) -> None:
        self._movers = movers
        self._lock = lock
        self._used: dict[int, Mover] = {}
        self._keys: set[int] = set()
        self._put_off: list[ExportedBlock] | None = None
        self.dropping: Callable[[list[int]], None] | None = None
        """Called with the keys that the movers drop, because copies may keep that memory, too."""

    def mover(self, gpu: int) -> Mover:
        """Return the mover that has, or will have, this group's memory on a GPU."""
        with self._lock:
            return self._used.setdefault(gpu, self._movers.mover(gpu))

    def movers(self, gpus: Iterable[int]) -> list[Mover]:
        """Return the movers that have adopted blocks of these GPUs, in order of GPU.

        None has those of a GPU whose mover did not start; :meth:`adopt_again` is for the next job.
        """
        return [self._used[gpu] for gpu in sorted(set(gpus)) if gpu in self._used]

    def digest(self, blocks: Iterable[ExportedBlock]) -> dict[int, list[bytes]]:
        """Hash every chunk of these blocks, on all GPUs in parallel. Returns digests by key."""
        by_gpu = keys_by_gpu(distinct(blocks))
        if not by_gpu:
            return {}
        with ThreadPoolExecutor(len(by_gpu)) as pool:
            answers = pool.map(lambda item: self._used[item[0]].digest(item[1]), by_gpu.items())
            return {key: digests for answer in answers for key, digests in answer.items()}

    def count_different(self, blocks: Iterable[ExportedBlock]) -> dict[int, int]:
        """Estimate how many chunks of these blocks differ from all others on their GPU, by GPU."""
        by_gpu = keys_by_gpu(distinct(blocks))
        return {gpu: self._used[gpu].count_different(keys) for gpu, keys in by_gpu.items()}

    def adopt(self, blocks: Iterable[ExportedBlock]) -> None:
        """Ask movers to adopt the blocks that are not adopted yet."""
        by_gpu: dict[int, dict[int, ExportedBlock]] = {}
        for exported in blocks:
            if exported.key not in self._keys:
                by_gpu.setdefault(exported.gpu, {}).setdefault(exported.key, exported)
        for gpu, fresh in by_gpu.items():
            self.mover(gpu).adopt([(h.key, h.block.size, h.descriptor) for h in fresh.values()])
            self._keys |= fresh.keys()

    def adopt_again(self, blocks: Collection[ExportedBlock]) -> None:
        """Ask the movers that replaced dead ones to adopt their blocks."""
        for gpu, mover in list(self._used.items()):
            if not mover.alive:
                del self._used[gpu]
                self._keys -= {exported.key for exported in blocks if exported.gpu == gpu}
        self.adopt(blocks)

    def add(self, allocation: Allocation) -> None:
        """Add a block in memory that its mover allocated."""
        self._keys.add(allocation.key)
        self._used[allocation.gpu] = allocation.mover

    def forget(self, keys: Iterable[int]) -> None:
        """Forget blocks that the caller will drop, or that a mover dropped on its own."""
        gone = set(keys)
        self._keys -= gone
        if self._put_off is not None:
            self._put_off = [exported for exported in self._put_off if exported.key not in gone]

    def drop(self, blocks: Iterable[ExportedBlock]) -> None:
        """Drop these blocks, at once or, if drops are put off, when that ends."""
        orphans = distinct(exported for exported in blocks if exported.key in self._keys)
        self._keys -= {exported.key for exported in orphans}
        if self._put_off is None:
            self._drop(orphans)
        else:
            self._put_off += orphans

    @property
    def drops_at_once(self) -> bool:
        """Whether a dropped block is freed at once."""
        return self._put_off is None

    def put_off_drops(self) -> None:
        """Keep dropped blocks in the movers until :meth:`drop_put_off`."""
        self._put_off = []

    def drop_put_off(self) -> None:
        """Drop the blocks that were put off; from now on blocks are dropped at once."""
        late, self._put_off = self._put_off or [], None
        self._drop(late)

    def _drop(self, blocks: Iterable[ExportedBlock]) -> None:
        with Undo() as each:
            for gpu, keys in keys_by_gpu(blocks).items():
                each.add(let_go, self._used[gpu], keys)
                if self.dropping is not None:
                    each.add(self.dropping, keys)
