"""Hold the threads of processes while the driver works on them, where no CRIU does (hazard 38)."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from phosd.engine.system import procfs, ptrace
from phosd.errors import Busy, Timeout

STOP_SECONDS = 30.0
"""Seconds that a thread may take to stop: it does not while it waits for a disk."""
HOLD_SECONDS = 600.0
"""Seconds that the driver may take. Then all are let go: one may have a lock that it waits for."""
_BETWEEN_LOOKS = 0.001


@contextlib.contextmanager
def held(but: Mapping[int, int], *, through_group_stop: bool = False) -> Iterator["Hold"]:
    """Hold all threads of processes inside the context, but for one of each, by process.

    ``through_group_stop``: that one runs even if its process is stopped by a signal, or comes to be
    so; at the end it stops with the others. Raises :class:`Busy` if another program traces one of
    them, and :class:`Timeout`; then all are as they were.
    """
    hold = Hold(but, through_group_stop=through_group_stop)
    hold.start()
    try:
        hold.await_held()
        hold.await_group_stop(hold.in_group_stop)  # a thread may be late, and would stop inside
        yield hold
    finally:
        hold.let_go.set()
        hold.join()
    if hold.error is not None:
        raise hold.error


class Hold(threading.Thread):
    """The thread that traces them; when it ends, in whatever way, they are not held any more."""

    def __init__(self, but: Mapping[int, int], *, through_group_stop: bool) -> None:
        super().__init__(name="phos-holder", daemon=True)
        self._but = but
        self._through_group_stop = through_group_stop
        self._stopped: dict[int, ptrace.Stop] = {}
        """The threads that are held, and why each has stopped."""
        self._running: set[int] = set()
        """Those that are traced, and run."""
        self._through: set[int] = set()
        """Those of them that run although their process has stopped."""
        self._held = threading.Event()
        self.in_group_stop: set[int] = set()
        """The processes that were in a group stop when they were held, of those whose thread is to
        run nevertheless.
        """
        self.error: Exception | None = None
        self.let_go = threading.Event()

    def await_held(self) -> None:
        """Wait until all are held. Raises what kept them from it."""
        self._held.wait()
        if self.error is not None:
            raise self.error

    def await_group_stop(self, pids: Collection[int]) -> None:
        """Wait until these processes, which have been sent SIGSTOP, are in a group stop, out of
        which the threads that run have been let. Raises :class:`Timeout`.
        """
        until = time.monotonic() + STOP_SECONDS
        while late := [pid for pid in pids if self._but[pid] not in self._through]:
            if self.error is not None:
                raise self.error
            if time.monotonic() > until:
                raise Timeout(
                    f"process {late[0]} does not stop",
                    hint="see what it waits for, such as a disk; the first process of a container "
                    "cannot be stopped from inside",
                )
            if any(procfs.ending(self._but[pid]) for pid in late):
                return  # the driver says so, too
            time.sleep(_BETWEEN_LOOKS)

    def run(self) -> None:
        try:
            try:
                self._hold()
                self._held.set()
                self._keep()
            except Exception as error:
                self.error = error
            self._held.set()
        finally:
            self._detach_all()

    def _hold(self) -> None:
        until = time.monotonic() + STOP_SECONDS
        for pid, runs in self._but.items():
            if self._through_group_stop:
                with contextlib.suppress(ProcessLookupError), _told(pid, runs):
                    ptrace.seize(runs, clones=True)
                    self._running.add(runs)
            # A thread that is not held yet may start others.
            while new := self._threads(pid) - self._stopped.keys() - self._running - {runs}:
                self._stop_all(pid, new, until)
            others = self._threads(pid) & self._stopped.keys()
            if self._through_group_stop and any(self._stopped[each].group_stop for each in others):
                self.in_group_stop.add(pid)

    def _keep(self) -> None:
        """Hold them until they are to be let go."""
        until = time.monotonic() + HOLD_SECONDS
        while not self.let_go.wait(_BETWEEN_LOOKS if self._running else HOLD_SECONDS):
            self._let_run()
            if time.monotonic() > until:
                for pid in self._but if self._through_group_stop else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                raise Timeout(
                    f"the driver has not done its work on process {min(self._but)} within "
                    f"{HOLD_SECONDS:.0f} s, so all its threads were let go",
                    hint="see the driver's log (dmesg); try again, or start the program under "
                    "`phos run`",
                )

    def _let_run(self) -> None:
        """Let those run on that have stopped and are to run."""

        def on(thread: int, stop: ptrace.Stop) -> None:
            if stop.started is not None:  # it would take part in the group stop
                self._running.add(stop.started)
            ptrace.let_run(thread, stop.signal)
            if stop.group_stop:
                self._through.add(thread)

        self._look(self._running, on)

    @staticmethod
    def _threads(pid: int) -> set[int]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return {each for each in procfs.threads(pid) if not procfs.ending(each)}
        return set()

    def _stop_all(self, pid: int, threads: Collection[int], until: float) -> None:
        seized: set[int] = set()
        try:
            for thread in threads:
                with contextlib.suppress(ProcessLookupError), _told(pid, thread):
                    ptrace.seize(thread)
                    seized.add(thread)
                    ptrace.interrupt(thread)
        finally:
            self._await_stops(seized, until)  # one is let go of when it has stopped
        if seized:
            raise Timeout(
                f"threads of process {pid} do not stop: {sorted(seized)}",
                hint="see what they wait for, such as a disk; the program goes on",
            )

    def _await_stops(self, traced: set[int], until: float) -> None:
        """Move threads from ``traced`` to those that are held, until all have stopped."""

        def stopped(thread: int, stop: ptrace.Stop) -> None:
            self._stopped[thread] = stop
            traced.discard(thread)

        while traced and time.monotonic() < until:
            self._look(traced, stopped)
            time.sleep(_BETWEEN_LOOKS)

    @staticmethod
    def _look(threads: set[int], act: Callable[[int, ptrace.Stop], None]) -> None:
        """Call ``act`` for those that have stopped, and leave out those that have ended."""
        for thread in tuple(threads):
            try:
                if (stop := ptrace.stopped(thread)) is not None:
                    act(thread, stop)
            except ProcessLookupError:
                threads.discard(thread)

    def _detach_all(self) -> None:
        for thread in self._running:
            with contextlib.suppress(ProcessLookupError):
                ptrace.interrupt(thread)
        # What does not stop in time is detached when this thread ends.
        self._await_stops(self._running, time.monotonic() + STOP_SECONDS)
        for thread, stop in self._stopped.items():
            with contextlib.suppress(ProcessLookupError):
                ptrace.detach(thread, stop.signal)


@contextlib.contextmanager
def _told(pid: int, thread: int) -> Iterator[None]:
    """Say of which process it is if another program traces the thread. Raises :class:`Busy`."""
    try:
        yield
    except PermissionError as error:
        raise Busy(
            f"thread {thread} of process {pid} cannot be held: another program, such as a "
            "debugger, traces it",
            hint="end that program and try again",
        ) from error
