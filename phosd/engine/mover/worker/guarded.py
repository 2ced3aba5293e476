"""Guard the memory of parked processes, and their reservations, when the engine is gone.

An engine that is killed leaves processes whose memory only the mover holds. Whoever brings them
back asks for it by process and block.
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

    A block that the engine is gone from, or has dropped, is known to the GPU by a negative key, so
    that no key of an engine is taken.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._guarded: dict[tuple[int, int, int], int] = {}
        self._orphans = itertools.count(-1, -1)
        self._lock = threading.Lock()

    @property
    def empty(self) -> bool:
        """Whether nothing has to outlive the engine."""
        return not self._guarded and not self._gpu.reserved

    def answer(self, request: wire.Message) -> tuple[wire.Message, list[int]]:
        """Carry out what a visitor may ask for."""
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
        """Keep blocks, as (pid, start time, block id, key), whatever becomes of the engine."""
        rows = {(pid, start, block): key for pid, start, block, key in blocks}
        for key in rows.values():
            self._gpu.block(key)
        with self._lock:
            self._guarded |= rows

    def unguard(self, processes: Iterable[ProcessId]) -> None:
        """Nothing of these processes is parked any more."""
        gone = set(processes)
        with self._lock:
            self._guarded = {row: key for row, key in self._guarded.items() if row[:2] not in gone}
            self._drop_orphans()

    def drop(self, keys: Iterable[int]) -> None:
        """The engine needs these blocks no more. What is guarded stays: perhaps its process could
        not be given it back, and nobody else has it.
        """
        with self._lock:
            self._drop(keys)

    def end_session(self) -> None:
        """The engine is gone: drop what it had, but for what is guarded."""
        self._gpu.reserve(0, ())
        with self._lock:
            keys = self._gpu.keys()  # but for what a drain has dropped
            self._guarded = {row: key for row, key in self._guarded.items() if key in keys}
            self._drop([key for key in keys if key >= 0])

    def forget_the_dead(self) -> None:
        """Nobody can give memory back to a process that has ended."""
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
