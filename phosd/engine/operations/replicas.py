"""Copy a group's memory to replicas on other GPUs while the group runs, before it moves there."""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import (
    Allocation,
    ExportedBlock,
    distinct,
    if_alive,
    let_go,
    new_key,
)
from phosd.engine.memory.precopy_rounds import PASSES, Missing, copy_while_running
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import changed_in_the_stop


@dataclass(frozen=True)
class _Replica:
    """The replica of one block: ``allocation`` is the new memory; ``source`` is the key of the
    original in the mover of the new GPU.
    """

    exported: ExportedBlock
    allocation: Allocation
    source: int


class Replicas:
    """Make replicas of the blocks on GPUs that are left, and keep them equal to the originals.

    Replicas are known by the keys of their originals in ``memory``. ``moves`` maps the ordinals of
    the GPUs that are left to the new ones. The end of the context drops the replicas, or, after
    :meth:`take_over`, the originals.
    """

    def __init__(self, node: Node, memory: DeviceMemory, moves: Mapping[int, int]) -> None:
        self._memory = memory
        self._moves = moves
        self._movers = {gpu: node.movers.mover(gpu) for gpu in moves.values()}
        self._replicas: dict[int, _Replica] = {}
        self._left: list[ExportedBlock] = []
        self._guarded: set[ProcessId] = set()
        self._lock = threading.RLock()  # the watch threads drop what the program frees

    def while_running(
        self, links: Sequence[HookLink], progress: Progress, *, interruptible: bool
    ) -> None:
        """Copy in passes until little differs, or a pass no longer reduces it much.

        Everything is copied once if the GPUs do not interrupt the program.
        """

        def differing() -> Missing[int]:
            self.follow()
            return self._differing() if interruptible else self._everything()

        passes = PASSES if interruptible else 1
        copy_while_running(self._memory, links, progress, differing, self._copy, passes=passes)

    def follow(self) -> None:
        """Make replicas of new blocks, drop those of freed blocks. Raises :class:`OutOfMemory`."""
        leaving = {h.key: h for h in distinct(self._memory.all()) if h.gpu in self._moves}
        fresh: dict[int, list[ExportedBlock]] = {}
        with self._lock:
            self._drop([key for key in self._replicas if key not in leaving])
            for key, exported in leaving.items():
                if key not in self._replicas:
                    fresh.setdefault(exported.gpu, []).append(exported)
            for gpu, blocks in fresh.items():
                self._make(blocks, gpu)

    def finish(self, progress: Progress) -> None:
        """Copy what still differs, and prove that nothing differs. The program is stopped.

        Raises :class:`MisSpeculation` if the memory is still being written.
        """
        for _ in range(PASSES):
            differing = self._differing()
            if not differing:
                return
            self._copy(differing, progress)
        raise changed_in_the_stop(sum(map(len, differing.values())))

    def guard(self) -> None:
        """Ask the movers to guard the replicas, too, so that they outlive this process."""
        rows: dict[int, list[tuple[ProcessId, int, int]]] = {}
        blocks = self._memory.all()
        processes = {pid: procfs.process_id(pid) for pid in {exported.pid for exported in blocks}}
        for exported in blocks:
            replica, process = self._replicas.get(exported.key), processes[exported.pid]
            if replica is not None and process is not None:
                rows.setdefault(replica.allocation.gpu, []).append(
                    (process, exported.block.id, replica.allocation.key)
                )
                self._guarded.add(process)
        for gpu, guarded in rows.items():
            self._movers[gpu].guard(guarded)

    def take_over(self) -> None:
        """Make the replicas the memory of the processes, which are on the new GPUs now."""
        allocations = {key: replica.allocation for key, replica in self._replicas.items()}
        self._left = self._memory.move(allocations, self._moves)

    def __enter__(self) -> "Replicas":
        self._memory.adopted.dropping = self._drop
        return self

    def __exit__(self, *_: object) -> None:
        with Undo() as undo:
            if self._left:
                undo.add(self._release)
            else:
                undo.add(self._drop, list(self._replicas))
                for mover in self._movers.values() if self._guarded else ():
                    undo.add(if_alive, mover, partial(mover.unguard, self._guarded))
            self._memory.adopted.dropping = None

    def _make(self, blocks: Sequence[ExportedBlock], gpu: int) -> None:
        """Make replicas of blocks of one GPU, all of them or none."""
        new = self._moves[gpu]
        mover = self._movers[new]
        replicas: list[tuple[ExportedBlock, int]] = []
        sources: list[tuple[int, int, int]] = []
        with Undo() as undo, ExitStack() as borrowed:
            for exported, descriptor in self._memory.duplicates(blocks):
                borrowed.callback(os.close, descriptor)
                sources.append((new_key(), exported.block.size, descriptor))
                replicas.append((exported, new_key()))
            descriptors = mover.create(
                [(key, exported.block.size) for exported, key in replicas],
                host=[key for exported, key in replicas if exported.host],
            )
            undo.add(let_go, mover, [key for _, key in replicas])
            for descriptor in descriptors:
                undo.add(os.close, descriptor)
            mover.adopt(sources, home=gpu)
            undo.forget()
        for (exported, key), source, descriptor in zip(replicas, sources, descriptors, strict=True):
            self._replicas[exported.key] = _Replica(
                exported, Allocation(mover, key, descriptor), source[0]
            )

    def _everything(self) -> dict[int, list[int]]:
        """Return the indices of all chunks, by key."""
        with self._lock:
            return {
                key: list(range(replica.exported.chunks)) for key, replica in self._replicas.items()
            }

    def _differing(self) -> dict[int, list[int]]:
        """Return the indices of the chunks that differ from their replicas, by key."""
        with self._lock:
            replicas = dict(self._replicas)
        keys: dict[int, list[int]] = {}
        for replica in replicas.values():
            keys.setdefault(replica.allocation.gpu, []).append(replica.allocation.key)
        with ThreadPoolExecutor(1 + len(keys)) as pool:
            theirs = pool.submit(
                self._memory.adopted.digest, [replica.exported for replica in replicas.values()]
            )
            answers = pool.map(lambda gpu: self._movers[gpu].digest(keys[gpu]), keys)
            ours = {key: digests for answer in answers for key, digests in answer.items()}
        found = {}
        for key, digests in theirs.result().items():
            pairs = zip(digests, ours[replicas[key].allocation.key], strict=True)
            if differing := [index for index, (a, b) in enumerate(pairs) if a != b]:
                found[key] = differing
        return found

    def _copy(self, differing: Missing[int], progress: Progress) -> None:
        chunks: dict[int, dict[int, tuple[int, Sequence[int]]]] = {}
        for key, indices in differing.items():
            replica = self._replicas[key]
            chunks.setdefault(replica.allocation.gpu, {})[replica.allocation.key] = (
                replica.source,
                indices,
            )
        with ThreadPoolExecutor(len(chunks)) as pool:
            list(pool.map(lambda gpu: self._movers[gpu].fetch(chunks[gpu], progress), chunks))

    def _drop(self, keys: Iterable[int]) -> None:
        with self._lock, Undo() as each:
            gone = [
                replica for key in keys if (replica := self._replicas.pop(key, None)) is not None
            ]
            for mover, replicas in self._by_mover(gone):
                dropped = [
                    key for replica in replicas for key in (replica.allocation.key, replica.source)
                ]
                each.add(let_go, mover, dropped)
                for replica in replicas:
                    each.add(os.close, replica.allocation.descriptor)

    def _release(self) -> None:
        """Drop the originals, and the imports of them in the movers of the new GPUs."""
        pids = {exported.pid for exported in self._left}
        processes = {found for pid in pids if (found := procfs.process_id(pid)) is not None}
        old: dict[int, list[int]] = {}
        for exported in distinct(self._left):
            old.setdefault(exported.gpu, []).append(exported.key)
        with Undo() as each:
            for mover, replicas in self._by_mover(self._replicas.values()):
                each.add(let_go, mover, [replica.source for replica in replicas])
                for replica in replicas:
                    each.add(os.close, replica.allocation.descriptor)
            for gpu, keys in old.items():
                mover = self._memory.adopted.mover(gpu)
                each.add(let_go, mover, keys)
                # Otherwise this mover may guard replicas for these processes.
                if gpu not in self._movers:
                    each.add(if_alive, mover, partial(mover.unguard, processes))
            for exported in self._left:
                each.add(os.close, exported.descriptor)

    def _by_mover(self, replicas: Iterable[_Replica]) -> list[tuple[Mover, list[_Replica]]]:
        found: dict[int, list[_Replica]] = {}
        for replica in replicas:
            found.setdefault(replica.allocation.gpu, []).append(replica)
        return [(self._movers[gpu], some) for gpu, some in found.items()]
