"""Report an operation's progress to its caller, which may cancel it."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from phosd.engine.job.affected import AffectedSet
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.engine.job.figures import Figures
from phosd.errors import Internal


@dataclass
class PhaseRecord:
    """One phase of an operation. Times are ``time.monotonic()`` seconds."""

    name: str
    start: float
    stopped: bool
    end: float | None = None
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass
class Progress(Cancellation):
    """The progress of one operation; ``observer`` is called at every change.

    An operation calls :meth:`phase` at each step of its protocol, with ``stopped=True`` while the
    program is stopped, :meth:`advance` as bytes move, and :meth:`note` for what a reader should
    know (the mode used and why). It calls :meth:`check` wherever it may be cancelled; code that
    only does that takes a :class:`Cancellation`.
    """

    observer: Callable[["Progress"], None] | None = None
    phases: list[PhaseRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    suspects: list[KernelMark] = field(default_factory=list)
    """Kernels, at least one of which wrote memory that was not predicted."""
    disproved: list[KernelMark] = field(default_factory=list)
    """Those among them of at least one of which the analysis is wrong."""
    wrong_guesses: int = 0
    figures: Figures = field(default_factory=Figures)
    stuck: bool = False
    """Whether it was given up and cannot end yet: nobody else shall wait for it."""
    holding: bool = False
    """Whether it waits, for as long as it takes, to be told to :meth:`go_on`."""
    result: str = ""
    """What the operation has made, if that is complete before the operation is."""
    recorder: Callable[[AffectedSet], None] | None = None
    """Writes the record of affected processes, for the phosd that finds this job interrupted."""
    _named: frozenset[int] = field(default=frozenset(), init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _told: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def phase(self, name: str, *, stopped: bool = False, bytes_total: int = 0) -> None:
        """End the current phase and begin ``name``."""
        self.finish()
        self.phases.append(
            PhaseRecord(name, time.monotonic(), stopped=stopped, bytes_total=bytes_total)
        )
        self._tell()

    def advance(self, byte_count: int) -> None:
        """Count ``byte_count`` more bytes of the current phase as done; from any thread."""
        with self._counting:
            if self.phases:
                self.phases[-1].bytes_done += byte_count
        self._tell()

    def about_to_touch(self, affected: AffectedSet) -> None:
        """Record what the job affects, before it stops or creates the first process.

        Raises what the recorder raises; then nothing may be touched.
        """
        if self.recorder is not None:
            self.recorder(affected)
        self._named = frozenset(process.pid for process in affected.processes)

    def require_named(self, pids: Iterable[int]) -> None:
        """Raise :class:`~phosd.errors.Internal` before a process is stopped that the last record
        does not name (invariant 3): nobody would let it go on if phosd ended now.
        """
        if unnamed := set(pids) - self._named:
            raise Internal(
                f"the gate of process {min(unnamed)} would be closed before the journal names the "
                "process (invariant 3)",
                hint="it goes on; this is a defect of phosd",
            )

    def note(self, text: str) -> None:
        """Add a text for the reader of the job."""
        self.notes.append(text)
        self._tell()

    def made(self, result: str) -> None:
        """Say what the operation has made, as that is complete."""
        self.result = result
        self._tell()

    def hold(self) -> None:
        """Wait until :meth:`go_on` or :meth:`cancel` is called, or was called before."""
        self.holding = True
        self._tell()
        self._told.wait()
        self.holding = False
        self._tell()

    def go_on(self) -> None:
        """End the wait of :meth:`hold`; from any thread."""
        self._told.set()

    def cancel(self) -> None:
        super().cancel()
        self._told.set()

    @property
    def idle(self) -> bool:
        """Whether it only waits, so that nobody else shall wait for it."""
        return self.stuck or self.holding

    def held_up(self) -> None:
        if not self.stuck:
            self.stuck = True
            self.note("given up, and waiting for a file system that does not answer")

    def found_suspects(self, kernels: Iterable[KernelMark], *, disproved: bool = False) -> None:
        """Count a wrong guess, caused by at least one of these kernels. ``disproved``: what they
        write was told by their analysis.
        """
        kernels = list(kernels)
        self.wrong_guesses += 1
        if disproved:
            self.disproved += [kernel for kernel in kernels if kernel not in self.disproved]
        self.suspects += [kernel for kernel in kernels if kernel not in self.suspects]
        self._tell()

    def finish(self) -> None:
        """End the current phase."""
        if self.phases and self.phases[-1].end is None:
            self.phases[-1].end = time.monotonic()

    @property
    def stop_seconds(self) -> float:
        """The seconds for which the program has been stopped so far."""
        now = time.monotonic()
        return sum((p.end or now) - p.start for p in self.phases if p.stopped)

    def _tell(self) -> None:
        if self.observer is not None:
            self.observer(self)


class Beside(Progress):
    """The progress of a part that runs beside the rest of an operation, and may be cancelled
    alone.
    """

    def __init__(self, operation: Progress) -> None:
        super().__init__()
        self._operation = operation

    def advance(self, byte_count: int) -> None:
        self._operation.advance(byte_count)

    def note(self, text: str) -> None:
        self._operation.note(text)

    def require_named(self, pids: Iterable[int]) -> None:
        self._operation.require_named(pids)

    def check(self) -> None:
        super().check()
        self._operation.check()
