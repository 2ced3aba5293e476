"""Guard the memory of parked processes, and their reservations, after the engine is gone.

If an engine is killed, only the mover still holds the memory of its parked processes. Recovery asks
for it by process and block.
"""

import itertools
import logging
import threading
from collections.abc import Iterable

from phosd.engine.mover.protocol import wire
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, PhosError

_log = logging.getLogger(__name__)


class GuardedMemory:
    """Guard blocks and reservations of a mover's GPU beyond the life of its engine. Thread-safe.

    Guarded blocks that the engine dropped or left behind get negative keys, so that they cannot
    collide with an engine's keys.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._guarded: dict[tuple[int, int, int], int] = {}
        self._orphans = itertools.count(-1, -1)
        self._lock = threading.Lock()

    @property
    def empty(self) -> bool:
        """Whether there is nothing that must outlive the engine."""
        return not self._guarded and not self._gpu.reserved

    def answer(self, request: wire.Message) -> tuple[wire.Message, list[int]]:
        """Carry out a request that a visitor may send."""
        match request:
            case wire.ListParked():
                return self._list()
            case wire.Unguard():
                self.unguard(request.processes)
            case wire.Reserve() if request.byte_count == 0 and request.processes:
                self._gpu.reserve(0, request.processes)
            case _:
                raise Internal(f"a visitor may not ask for {type(request).__name__}")
        return wire.Done(), []

    def guard(self, blocks: Iterable[tuple[int, int, int, int]]) -> None:
        """Guard blocks, as (pid, start time, block id, key), so that they outlive the engine."""
        rows = {(pid, start, block): key for pid, start, block, key in blocks}
        for key in rows.values():
            self._gpu.block(key)
        with self._lock:
            self._guarded |= rows

    def unguard(self, processes: Iterable[ProcessId]) -> None:
        """Stop guarding blocks of these processes, and drop those that no engine has."""
        gone = set(processes)
        with self._lock:
            self._guarded = {row: key for row, key in self._guarded.items() if row[:2] not in gone}
            self._drop_orphans()

    def drop(self, keys: Iterable[int]) -> None:
        """Drop blocks that the engine no longer needs.

        Guarded blocks stay: perhaps their process could not get them back, and no other process has
        them.
        """
        with self._lock:
            self._drop(keys)

    def end_session(self) -> None:
        """Drop the blocks of an engine that is gone, except for guarded ones."""
        self._gpu.reserve(0, ())
        with self._lock:
            keys = self._gpu.keys()  # without those that a drain has dropped
            self._guarded = {row: key for row, key in self._guarded.items() if key in keys}
            self._drop([key for key in keys if key >= 0])

    def forget_the_dead(self) -> None:
        """Drop the blocks and reservations of processes that have ended."""
        with self._lock:
            known = {ProcessId(*row[:2]) for row in self._guarded}
        known |= self._gpu.reserved
        if dead := [process for process in known if procfs.process_id(process[0]) != process]:
            _log.info("processes %s ended while they were parked", [pid for pid, _ in dead])
            self.unguard(dead)
            self._gpu.reserve(0, dead)

    def _list(self) -> tuple[wire.Message, list[int]]:
        with self._lock:
            blocks = self._gpu.blocks
            held = {row: blocks[key].fd for row, key in self._guarded.items() if key in blocks}
        return wire.Parked(list(held), sorted(self._gpu.reserved)), list(held.values())

    def _drop(self, keys: Iterable[int]) -> None:
        guarded = {*self._guarded.values()}
        wanted = {*keys}
        orphans = {key: next(self._orphans) for key in wanted & guarded}
        self._gpu.rename(orphans)
        self._guarded = {row: orphans.get(key, key) for row, key in self._guarded.items()}
        self._gpu.drop(wanted - guarded)

    def _drop_orphans(self) -> None:
        guarded = {*self._guarded.values()}
        try:
            self._gpu.drop([key for key in self._gpu.keys() - guarded if key < 0])
        except PhosError as error:
            _log.error("memory that nobody needs any more could not be freed: %s", error)
