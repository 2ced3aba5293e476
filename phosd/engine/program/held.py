"""Hold the threads of processes while the driver works on them, where no CRIU does (hazard 38)."""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping

from phosd.engine.system import procfs, ptrace
from phosd.errors import Busy, Timeout

STOP_SECONDS = 30.0
"""Seconds that a thread may take to stop: it does not while it waits for a disk."""
_BETWEEN_LOOKS = 0.001


@contextlib.contextmanager
def held(but: Mapping[int, int]) -> Iterator[None]:
    """Hold all threads of processes inside the context, but for one of each, by process.

    Raises :class:`Busy` if another program traces one of them, and :class:`Timeout`; then all run.
    """
    holder = _Holder(but)
    holder.start()
    try:
        holder.await_held()
        yield
    finally:
        holder.let_go.set()
        holder.join()


class _Holder(threading.Thread):
    """The thread that traces them; when it ends, in whatever way, they run."""

    def __init__(self, but: Mapping[int, int]) -> None:
        super().__init__(name="phos-holder", daemon=True)
        self._but = but
        self._signals: dict[int, int] = {}
        """The threads that have stopped, with the signal that each has met."""
        self._held = threading.Event()
        self._error: Exception | None = None
        self.let_go = threading.Event()

    def await_held(self) -> None:
        """Wait until all are held. Raises what kept them from it."""
        self._held.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            try:
                self._hold()
            except Exception as error:
                self._error = error
            self._held.set()
            if self._error is None:
                self.let_go.wait()
        finally:
            for thread, signal in self._signals.items():
                with contextlib.suppress(ProcessLookupError):
                    ptrace.detach(thread, signal)

    def _hold(self) -> None:
        until = time.monotonic() + STOP_SECONDS
        for pid, runs in self._but.items():
            # A thread that is not held yet may start others.
            while new := self._threads(pid) - self._signals.keys() - {runs}:
                self._stop_all(pid, new, until)

    @staticmethod
    def _threads(pid: int) -> set[int]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return {each for each in procfs.threads(pid) if not procfs.ending(each)}
        return set()

    def _stop_all(self, pid: int, threads: Collection[int], until: float) -> None:
        seized = set()
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                try:
                    ptrace.seize(thread)
                except PermissionError as error:
                    raise Busy(
                        f"thread {thread} of process {pid} cannot be held: another program, such "
                        "as a debugger, traces it",
                        hint="end that program and try again",
                    ) from error
                seized.add(thread)
        while seized:
            for thread in tuple(seized):
                try:
                    signal = ptrace.stopped(thread)
                except ProcessLookupError:
                    seized.discard(thread)
                    continue
                if signal is not None:
                    self._signals[thread] = signal
                    seized.discard(thread)
            if seized and time.monotonic() > until:
                raise Timeout(
                    f"threads of process {pid} do not stop: {sorted(seized)}",
                    hint="see what they wait for, such as a disk; the program goes on",
                )
            time.sleep(_BETWEEN_LOOKS)
