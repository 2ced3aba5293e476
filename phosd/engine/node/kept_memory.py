"""Keep the device memory of programs exported between their jobs."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.node.movers import Movers
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId


class KeptMemory:
    """Exported device memory, by processes. Safe to use from several threads."""

    def __init__(self, movers: Movers) -> None:
        self._movers = movers
        self._kept: dict[frozenset[ProcessId], DeviceMemory] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release everything."""
        self._close_kept(lambda _: True)

    def let_go_of_the_dead(self) -> None:
        """Release the memory of programs that have ended; their watchers may not know it yet."""
        self._close_kept(
            lambda processes: all(procfs.process_id(each.pid) != each for each in processes)
        )

    def gpus(self) -> set[int]:
        """Return the GPUs on which memory is kept."""
        with self._lock:
            return {mover.gpu for kept in self._kept.values() for mover in kept.movers()}

    @contextlib.contextmanager
    def of(self, group: CheckpointGroup) -> Iterator[DeviceMemory]:
        """Lend the group's device memory to a job.

        Afterwards it is kept for the next job, if all its processes are watched for what they free.
        """
        processes = group.hooked_ids
        memory = self._take_kept(group) or DeviceMemory(
            self._movers, {m.pid: m.gpus for m in group.members if m.link is not None}
        )
        with self.keeping(processes, memory):
            memory.revive()
            yield memory

    @contextlib.contextmanager
    def keeping(self, processes: frozenset[ProcessId], memory: DeviceMemory) -> Iterator[None]:
        """Keep ``memory`` that a job made for these processes, as :meth:`of` does."""
        with Undo() as undo:
            undo.add(self._keep, processes, memory)
            yield

    def let_go(self, group: CheckpointGroup) -> None:
        """Release the memory of these processes."""
        with self.letting_go(group):
            pass

    @contextlib.contextmanager
    def letting_go(self, group: CheckpointGroup) -> Iterator[None]:
        """Release the memory of these processes at the end of the context. Inside, it keeps no
        mover from leaving, with which its blocks go faster.
        """
        with Undo() as undo:
            if memory := self._take_kept(group):
                undo.add(memory.close)
            yield

    def _keep(self, processes: frozenset[ProcessId], memory: DeviceMemory) -> None:
        if not memory.watchers.complete:
            memory.close()
            return
        with self._lock:
            self._kept[processes] = memory

    def _take_kept(self, group: CheckpointGroup) -> DeviceMemory | None:
        """Take out the memory of exactly the group's processes that have any.

        Memory of any other group that contains one of its processes is released, since that group
        no longer exists.
        """
        pids = set(group.gpu_pids)
        with self._lock:
            same = self._kept.pop(group.hooked_ids, None)
        self._close_kept(lambda processes: any(pid in pids for pid, _ in processes))
        return same

    def _close_kept(self, unwanted: Callable[[frozenset[ProcessId]], bool]) -> None:
        """Release the memory of the ``unwanted`` groups, and of groups that have ended."""
        with self._lock:
            keys = [
                key
                for key, kept in self._kept.items()
                if unwanted(key) or not kept.watchers.complete
            ]
            others = [self._kept.pop(key) for key in keys]
        for memory in others:
            memory.close()
