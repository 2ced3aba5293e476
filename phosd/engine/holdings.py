"""What the engine holds of a unit's device memory: a descriptor and a mover's mapping a block.

Holding a block keeps its memory alive while the process has let go of it. That is parking.
"""

import contextlib
import ctypes
import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from phosd.engine.errors import Internal, MisSpeculation, PhosError, Unsupported
from phosd.engine.faults import Point, point
from phosd.engine.hooklink import Block, BlockFlag, HookLink, HookState
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.image.writer import ImageWriter, Pack
from phosd.engine.mover import Mover
from phosd.engine.progress import Progress
from phosd.engine.undo import Undo

_KCMP, _KCMP_FILE = 312, 0  # x86-64
_SHARED = BlockFlag.EXPORTED | BlockFlag.IMPORTED

_keys = itertools.count()  # a mover serves several jobs, so keys are never used twice


class Movers(Protocol):
    """Gives the data mover of a GPU, by the node's ordinal."""

    def mover(self, gpu: int) -> Mover:
        """The running mover of ``gpu``."""


@dataclass(frozen=True)
class Held:
    """One block of process ``pid`` and the descriptor that keeps its memory.

    ``key`` is what the mover calls it; blocks of different processes that are the same memory
    have the same key.
    """

    pid: int
    block: Block
    gpu: int
    descriptor: int
    key: int


class Holdings:
    """The blocks of a unit, adopted by the movers of their GPUs.

    ``gpus_of`` maps a pid to the node's ordinals of the devices that the process sees.
    """

    def __init__(self, movers: Movers, gpus_of: dict[int, list[int]]) -> None:
        self._movers = movers
        self._gpus_of = gpus_of
        self._held: dict[tuple[int, int], Held] = {}
        self._used: dict[int, Mover] = {}
        self._adopted: set[int] = set()
        self._packs: dict[int, list[Pack]] = {}

    def take(self, links: Sequence[HookLink]) -> None:
        """Export what is not held yet, and let go of what a process has freed meanwhile.

        With a closed gate this is exact. Blocks without a descriptor are left out: ``rehome``
        gives them one.
        """
        for link in links:
            blocks = link.list_blocks()
            alive = {(link.pid, block.id) for block in blocks}
            self._let_go([k for k in self._held if k[0] == link.pid and k not in alive])
            wanted = [
                block.id
                for block in blocks
                if block.flags & BlockFlag.HAS_DESCRIPTOR and (link.pid, block.id) not in self._held
            ]
            if wanted:
                self._adopt(self._export(link, wanted[0] - 1))

    def of(self, pid: int) -> list[Held]:
        """The blocks of one process, in order of id."""
        return [h for (owner, _), h in sorted(self._held.items()) if owner == pid]

    def all(self) -> list[Held]:
        """Every block, in order of process and id."""
        return [held for _, held in sorted(self._held.items())]

    def distinct(self) -> list[Held]:
        """One holder of each piece of memory, in order of process and id."""
        first: dict[int, Held] = {}
        for held in self.all():
            first.setdefault(held.key, held)
        return list(first.values())

    def prepare_packs(self, links: Sequence[HookLink], writer: ImageWriter) -> None:
        """Have packs ready for all that the processes hold, while they still run."""
        chunks: Counter[int] = Counter()
        for link in links:
            for block in link.list_blocks():
                chunks[self._gpu_of(link.pid, block)] += -(-block.size // CHUNK)
        for gpu, count in chunks.items():
            mover = self._used.setdefault(gpu, self._movers.mover(gpu))
            self._packs[gpu] = writer.packs(count)
            mover.pin(self._packs[gpu])

    def unpin(self) -> None:
        """Let go of the packs, when the program runs again."""
        with Undo() as each:
            for gpu in self._packs:
                each.add(_if_alive, self._used[gpu], self._used[gpu].unpin)
            self._packs.clear()

    def movers(self) -> list[Mover]:
        """The movers that hold something."""
        return [self._used[gpu] for gpu in sorted({held.gpu for held in self.all()})]

    def digest(self) -> dict[int, list[bytes]]:
        """The digest of every chunk, by key; all GPUs at once. The gates must be closed."""
        by_gpu = self._keys_by_gpu(self.distinct())
        if not by_gpu:
            return {}
        with ThreadPoolExecutor(len(by_gpu)) as pool:
            answers = pool.map(lambda item: self._used[item[0]].digest(item[1]), by_gpu.items())
            return {key: digests for answer in answers for key, digests in answer.items()}

    def save(
        self, digests: dict[int, list[bytes]], writer: ImageWriter, progress: Progress
    ) -> dict[int, tuple[ChunkRef, ...]]:
        """Copy every block into the image; where its chunks are, by key.

        Raises :class:`MisSpeculation` when saved bytes are not those that were hashed.
        """
        chunks: dict[int, tuple[ChunkRef, ...]] = {}
        for gpu, keys in self._keys_by_gpu(self.distinct()).items():
            wanted = {key: digests[key] for key in keys}
            saved = self._used[gpu].save(wanted, writer, progress, self._packs.get(gpu, ()))
            if saved.changed:
                raise MisSpeculation(
                    f"{len(saved.changed)} chunks on GPU {gpu} changed while the gate was closed",
                    hint="something outside the program writes its memory (a peer, a NIC)",
                )
            chunks |= saved.chunks
        return chunks

    def close(self) -> None:
        """Let go of everything."""
        with Undo() as undo:
            undo.add(self._let_go, list(self._held))
            self.unpin()

    def _export(self, link: HookLink, after: int) -> list[Held]:
        fresh = []
        for block, descriptor in link.export_blocks(after):
            if descriptor is None:
                continue
            if (link.pid, block.id) in self._held:
                os.close(descriptor)
                continue
            try:
                fresh.append(self._hold(link.pid, block, descriptor))
            except BaseException:
                os.close(descriptor)
                raise
        return fresh

    def _gpu_of(self, pid: int, block: Block) -> int:
        """The node's ordinal of the GPU that has the block. Raises when there is none."""
        if block.flags & BlockFlag.HOST_LOCATED:
            raise Unsupported(
                f"process {pid} has VMM memory in host RAM (block {block.id})",
                hint="use mode=driver",
            )
        gpus = self._gpus_of[pid]
        if not 0 <= block.device < len(gpus):
            raise Internal(
                f"process {pid} has memory on device {block.device}, but sees {len(gpus)}",
                hint="the hook and phosd disagree; use mode=driver, and report this",
            )
        return gpus[block.device]

    def _hold(self, pid: int, block: Block, descriptor: int) -> Held:
        gpu = self._gpu_of(pid, block)
        key = new_key()
        if block.flags & _SHARED:
            same = (h for h in self._held.values() if h.block.flags & _SHARED)
            key = next((h.key for h in same if same_file(h.descriptor, descriptor)), key)
        held = Held(pid, block, gpu, descriptor, key)
        self._held[pid, block.id] = held
        return held

    def _adopt(self, fresh: Iterable[Held]) -> None:
        by_gpu: dict[int, dict[int, Held]] = {}
        for held in fresh:
            if held.key not in self._adopted:
                by_gpu.setdefault(held.gpu, {}).setdefault(held.key, held)
        for gpu, blocks in by_gpu.items():
            mover = self._used.setdefault(gpu, self._movers.mover(gpu))
            mover.adopt([(h.key, h.block.size, h.descriptor) for h in blocks.values()])
            self._adopted |= blocks.keys()

    def _let_go(self, which: Iterable[tuple[int, int]]) -> None:
        gone = [self._held.pop(k) for k in which]
        still = {h.key for h in self._held.values()}
        for held in gone:
            os.close(held.descriptor)
        orphans = {h.key: h for h in gone if h.key in self._adopted - still}
        with Undo() as each:
            for gpu, keys in self._keys_by_gpu(orphans.values()).items():
                self._adopted -= set(keys)
                each.add(let_go, self._used[gpu], keys)

    @staticmethod
    def _keys_by_gpu(blocks: Iterable[Held]) -> dict[int, list[int]]:
        keys: dict[int, list[int]] = {}
        for held in blocks:
            keys.setdefault(held.gpu, []).append(held.key)
        return keys


def let_go(mover: Mover, keys: Sequence[int]) -> None:
    """Have the mover drop blocks. A dead one holds nothing any more."""
    _if_alive(mover, lambda: mover.drop(keys))


def _if_alive(mover: Mover, action: Callable[[], None]) -> None:
    if not mover.alive:
        return
    try:
        action()
    except PhosError:
        if mover.alive:
            raise


@contextlib.contextmanager
def room_kept(movers: Iterable[Mover], progress: Progress) -> Iterator[Callable[[], None]]:
    """Keeps for a checkpointed process the device memory that it will need again (hazard 19).

    A neighbour that takes it meanwhile would make the driver's restore fail for good. Call the
    function when the process has let go of its memory; at the end the memory is free for it.
    """
    before: list[tuple[Mover, int]] = []

    def give_up(mover: Mover, error: PhosError) -> None:
        progress.note(f"room for the program is not kept on GPU {mover.gpu}: {error}")

    for mover in movers:
        try:
            before.append((mover, mover.free_memory()[0]))
        except PhosError as error:  # it is dead; all that it had to save is saved
            give_up(mover, error)
    with Undo() as undo:

        def keep() -> None:
            for mover, free in before:
                try:
                    gained = mover.free_memory()[0] - free
                    if gained > 0:
                        undo.add(_if_alive, mover, mover.unreserve)
                        mover.reserve(gained)
                except PhosError as error:
                    give_up(mover, error)

        yield keep


def new_key() -> int:
    """A number for a block that no mover has seen yet."""
    return next(_keys)


def same_file(first: int, second: int) -> bool:
    """Whether two descriptors of this process are one open file (``kcmp``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    me = os.getpid()
    answer: int = libc.syscall(_KCMP, me, me, _KCMP_FILE, first, second)
    if answer < 0:
        code = ctypes.get_errno()
        raise Internal(
            f"comparing two descriptors failed ({os.strerror(code)})",
            hint="the kernel needs CONFIG_KCMP" if code == errno.ENOSYS else "run phosd as root",
        )
    return answer == 0


@contextlib.contextmanager
def parked(links: Sequence[HookLink], holdings: Holdings) -> Iterator[None]:
    """Inside, the processes hold none of their memory and their hooks are detached.

    After it every process has its memory at the same addresses again. The hooks must be awake by
    then, that is, the processes running.
    """
    with Undo() as undo:
        for link in links:
            undo.add(_give_back, link, holdings.of(link.pid))
            point(Point.HOOK_PARK)
            link.park()
        with detached(links):
            yield


@contextlib.contextmanager
def detached(links: Sequence[HookLink]) -> Iterator[None]:
    """Inside, the hooks hold no socket, so that CRIU meets none; after it they are connected."""
    with Undo() as undo:
        for link in links:
            undo.add(_connected, link)
            point(Point.HOOK_DETACH)
            link.detach()
        yield


def _connected(link: HookLink) -> None:
    """Also where only the answer to a request was lost, so that nobody knows if it was done."""
    if not link.connected:
        link.reattach()


def _give_back(link: HookLink, held: Sequence[Held]) -> None:
    _connected(link)
    if link.hello().state is HookState.PARKED:
        link.unpark((h.block.id, h.descriptor) for h in held)
