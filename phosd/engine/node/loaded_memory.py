"""Hold device memory with the bytes of an image, until the processes have it that it belongs to."""

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from phosd.engine.criu.run.memory_handles import MemoryName
from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import Allocation, if_alive, let_go
from phosd.engine.memory.handing_back import HeldBlock, hand_back
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.kept_memory import KeptMemory
from phosd.engine.node.movers import Movers
from phosd.engine.program.process_gpus import gpus_of
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import ImageCorrupt, Internal, PhosError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedBlock:
    """One block of ``process``, which is identified as in the manifest, and its memory."""

    process: ProcessId
    id: int
    size: int
    allocation: Allocation

    @property
    def held(self) -> HeldBlock:
        """The block as its process is to get it back."""
        memory = self.allocation
        return HeldBlock(self.id, self.size, memory.gpu, memory.key, memory.descriptor)


class LoadedMemory:
    """Device memory with the blocks of all processes of an image.

    ``kept`` collects the keys of blocks that are no longer ours to free; ``undo`` frees the others.
    What is kept for the next job goes to ``kept_memory``.
    """

    def __init__(
        self,
        movers: Movers,
        kept_memory: KeptMemory,
        pieces: list[LoadedBlock],
        kept: set[int],
        undo: Undo,
    ) -> None:
        self._movers = movers
        self._kept_memory = kept_memory
        self._pieces = pieces
        self._kept = kept
        self._undo = undo
        self._guarded = False

    @property
    def intact(self) -> bool:
        """Whether all movers live, without which it is gone."""
        return all(mover.alive for mover in _by_mover(self._pieces))

    def bytes_by_gpu(self) -> dict[int, int]:
        """Return the bytes on each GPU; what several processes share is counted once."""
        sizes = {(each.allocation.gpu, each.allocation.key): each.size for each in self._pieces}
        total: Counter[int] = Counter()
        for (gpu, _), size in sizes.items():
            total[gpu] += size
        return dict(total)

    def bytes_of(self, pid: int) -> int:
        """Return the bytes of the blocks of a process."""
        return sum(each.size for each in self._pieces if each.process.pid == pid)

    def belongs_to(self, ids: Mapping[int, int]) -> None:
        """Take the pids that the processes have now, by those that they were saved with."""
        self._pieces = [
            replace(each, process=each.process._replace(pid=ids[each.process.pid]))
            for each in self._pieces
        ]

    def descriptor_of(self, name: str) -> int:
        """Return the descriptor of a block, by the name of its memory
        (:class:`~phosd.engine.criu.run.memory_handles.MemoryName`). The processes have the pids
        that they were saved with.
        """
        wanted = MemoryName.parse(name)
        for piece in self._pieces:
            if wanted == MemoryName(piece.process.pid, piece.id):
                return piece.allocation.descriptor
        raise ImageCorrupt(
            f"the program had device memory open of which the image has nothing ({name})",
            hint="restore another image",
        )

    def hand_back(self, link: HookLink) -> None:
        """Ask a process to map its blocks. Raises as :func:`hand_back` does."""
        ours = [piece for piece in self._pieces if piece.process.pid == link.pid]
        if ours or link.hello().state is HookState.PARKED:  # perhaps without any block
            movers = {piece.allocation.gpu: piece.allocation.mover for piece in ours}
            hand_back(link, [piece.held for piece in ours], movers.__getitem__, self._replace)

    def guard(self) -> None:
        """Ask the movers to guard the memory, so that it outlives this process
        (:meth:`Mover.guard`).

        The processes of the image must exist.
        """
        self._guarded = True
        self._guard(self._pieces)

    @staticmethod
    def _guard(guarded: Iterable[LoadedBlock]) -> None:
        for mover, pieces in _by_mover(guarded).items():
            mover.guard((piece.process, piece.id, piece.allocation.key) for piece in pieces)

    def unguard(self) -> None:
        """Tell the movers to stop guarding the memory, which the processes have mapped."""
        with Undo() as each:
            for mover, pieces in _by_mover(self._pieces).items():
                processes = {piece.process for piece in pieces}
                each.add(if_alive, mover, partial(mover.unguard, processes))

    def keep(self, links: Sequence[HookLink]) -> None:
        """Keep the memory for the next job, which then need not copy it in order to export it.

        Call it when the processes have mapped the memory and while their gates are closed.
        """
        processes = frozenset(filter(None, (procfs.process_id(link.pid) for link in links)))
        memory = DeviceMemory(self._movers, {link.pid: gpus_of(link.hello()) for link in links})
        with self._kept_memory.keeping(processes, memory):
            try:
                for link in links:
                    pieces = (piece for piece in self._pieces if piece.process.pid == link.pid)
                    memory.hold(link, {piece.id: piece.allocation for piece in pieces})
            finally:  # a program may have ended by now, or not list all of its blocks
                self._kept |= {exported.key for exported in memory.all()}
            try:
                memory.watchers.watch_all(links)
            except PhosError as error:  # then it is not kept, and the next job has to copy it
                _log.warning("what a program frees will not be known: %s", error)

    def conclude(self, _: Manifest, links: Sequence[HookLink], __: Undo) -> None:
        """Let the restored program run, whose processes have mapped the memory."""
        for link in links:
            if link.hello().state is HookState.PARKED:
                raise Internal(
                    f"the memory of restored process {link.pid} is not mapped", hint="report this"
                )
        point(Point.RESTORE_OPEN)
        self.keep(links)
        for link in links:
            link.open_gate()

    def _replace(self, allocations: Mapping[int, Allocation]) -> None:
        ours = {}
        for key, new in allocations.items():
            self._undo.add(let_go_but, self._kept, new.mover, [new.key])
            ours[key] = replace(new, descriptor=os.dup(new.descriptor))
            self._undo.add(os.close, ours[key].descriptor)
        self._pieces = [
            replace(each, allocation=ours.get(each.allocation.key, each.allocation))
            for each in self._pieces
        ]
        if self._guarded:
            keys = {new.key for new in allocations.values()}
            self._guard(piece for piece in self._pieces if piece.allocation.key in keys)
        for key, new in allocations.items():
            self._kept.add(key)
            let_go(new.mover, [key])


def _by_mover(pieces: Iterable[LoadedBlock]) -> dict[Mover, list[LoadedBlock]]:
    found: dict[Mover, list[LoadedBlock]] = {}
    for piece in pieces:
        found.setdefault(piece.allocation.mover, []).append(piece)
    return found


def let_go_but(kept: Collection[int], mover: Mover, keys: Iterable[int]) -> None:
    """Ask a mover to drop the blocks with these keys that are not ``kept``."""
    let_go(mover, [key for key in keys if key not in kept])
