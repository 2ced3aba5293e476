"""Give threads back on which CPUs they may run, which CRIU does not."""

import contextlib
import os

from phosd.engine.criu.restore.restored_processes import RestoredProcesses
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.system import procfs


class Affinities(CriuPart):
    """Sets the affinities of the threads that CRIU has made, before any of them runs: a program may
    look at its own, or keep by them what belongs to a CPU.
    """

    def __init__(self, processes: RestoredProcesses) -> None:
        self._processes = processes

    def made(self) -> bool:
        ids = self._processes.ids()
        everywhere = set(range(os.cpu_count() or 1))
        for process in self._processes.found(ids):
            theirs: tuple[int, ...] = ()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                theirs = procfs.threads(ids[process.pid])
            for thread, cpus in process.affinity.items():
                if ids.get(thread) not in theirs:
                    continue
                present = set(cpus) & everywhere
                with contextlib.suppress(ProcessLookupError):  # the thread has ended since
                    os.sched_setaffinity(ids[thread], present or everywhere)
        return True
