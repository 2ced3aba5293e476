"""Analyse a module in a process that can do little, and keep what it finds.

What that process says is checked before it is used: it has parsed what a user wrote.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from phosd.engine.analysis.code import tools
from phosd.engine.analysis.table import merged
from phosd.engine.hook_client.answers import printable
from phosd.engine.kernels.cache import Cache
from phosd.engine.kernels.entry import MOST_KERNELS, Entry, KernelFacts, State, unknown
from phosd.engine.kernels.module import Module, memory_file
from phosd.engine.kernels.worker import Line, Orders
from phosd.engine.system.host_memory import total_memory
from phosd.engine.system.native import python_environment
from phosd.errors import Cancelled, Internal, PhosError, Reason

MODULE_SECONDS = 300
"""Processor time that one analysis of a module may take."""
_MEMORY_BYTES = 8 << 30
_ANSWER_BYTES = 256 << 20
_MOST_RUNS = 16
"""Most runs of one analysis: the kernel that ends the process is found by running those that it may
have been, each on its own.
"""
_TIMEOUT_FACTOR = 20
"""How many times its processor time it may take, on a machine that is busy."""
_LOOK_SECONDS = 0.05
_WORKER = "-P", "-m", "phosd.engine.kernels.worker"
_log = logging.getLogger(__name__)


@dataclass
class Found:
    """What came of an analysis: the entry, those of the names asked for that the module does not
    have, the processor ``seconds``, and whether it ended ``early``, and is to be asked for again.
    """

    entry: Entry
    absent: frozenset[str] = frozenset()
    seconds: float = 0.0
    early: bool = False


@dataclass
class _Run:
    """What one process has said, and how it ended: ``begun`` are the kernels at which it did."""

    kernels: dict[str, KernelFacts] = field(default_factory=dict)
    begun: tuple[str, ...] = ()
    failed: str = ""
    why: str = ""
    done: bool = False
    seconds: float = 0.0
    code: int = 0
    overdue: bool = False

    @property
    def ended_at(self) -> list[str]:
        """The kernels of which one has ended the process, if it has ended too early."""
        return [name for name in self.begun if name not in self.kernels]


class Analyser:
    """Analyses modules, and keeps the results in ``cache``. Safe to use from several threads.

    ``module_seconds`` is the processor time that one analysis may take.
    """

    def __init__(self, cache: Cache, module_seconds: int = MODULE_SECONDS) -> None:
        self.cache = cache
        self.module_seconds = module_seconds
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End what is going on, whose results are kept, and begin nothing more."""
        self._stopped.set()

    def known(self, digest: str, architecture: int) -> Entry | None:
        """Return what is known of a module, and need not be found anew."""
        entry = self.cache.get(digest, architecture)
        if entry is None or entry.state is State.ANALYSED or entry.tools == tools.version():
            return entry
        return None  # other tools may do what these could not

    def analyse(
        self,
        module: Module,
        architecture: int,
        names: Collection[str] | None = None,
        tell: Callable[[int], None] = lambda count: None,
    ) -> Found:
        """Analyse those kernels of a module that have these names and are not known yet; None: all.

        ``tell`` is called with how many have been found. Raises :class:`Internal` if a tool is
        missing, and :class:`Cancelled` if it is to begin after :meth:`stop`.
        """
        known = self.known(module.digest, architecture)
        had = {} if known is None else known.kernels
        asked = frozenset(names or ())
        if known is not None and (
            known.state is not State.ANALYSED
            or known.whole
            or (names is not None and asked <= had.keys())
        ):
            return Found(known, asked - had.keys() if known.whole else frozenset())
        if self._stopped.is_set():
            raise Cancelled(
                "no module is analysed any more", hint="phosd, or the command, is ending"
            )
        found = dict(had)
        single, seconds = False, 0.0
        for _ in range(_MOST_RUNS):
            orders = Orders(
                module.hash,
                architecture,
                None if names is None else tuple(asked - found.keys()),
                tuple(found),
                single,
                self.module_seconds,
                min(_MEMORY_BYTES, total_memory() // 4),
                _ANSWER_BYTES,
            )
            run = self._run(module, orders, tell, len(found) - len(had))
            seconds += run.seconds
            found |= run.kernels
            if run.done or run.failed or run.overdue:
                break
            if len(run.ended_at) == 1:
                found[run.ended_at[0]] = unknown(_end(run, self.module_seconds)[1])
            elif run.ended_at and not single:
                single = True
            else:
                break
        return self._kept(module, architecture, names, found, len(had), run, seconds)

    def _kept(
        self,
        module: Module,
        architecture: int,
        names: Collection[str] | None,
        found: dict[str, KernelFacts],
        had: int,
        run: _Run,
        seconds: float,
    ) -> Found:
        """Store what was found, and why there is no more of it."""
        state, reason, early = State.ANALYSED, "", False
        if not run.done:
            said, reason = (run.failed, run.why) if run.failed else _end(run, self.module_seconds)
            state = State(said) if said in list(State) else State.UNREADABLE
            # What has not been got round to for want of time may be asked for again.
            early = run.overdue or (state is State.TOO_LONG and len(found) > had)
            if early:
                state, reason = State.ANALYSED, ""
        if len(found) > MOST_KERNELS:
            state, reason = State.TOO_LARGE, f"it has more than {MOST_KERNELS} kernels"
            found = {}
        entry = Entry(
            module.digest,
            architecture,
            state=state,
            reason=_text(reason),
            tools=tools.version(),
            whole=run.done and names is None,
            kernels=found,
        )
        if state is not State.ANALYSED:
            _log.info("module %.12s is %s: %s", module.digest, state, reason)
        entry = self.cache.add(entry)
        absent = frozenset(names or ()) - entry.kernels.keys() if run.done else frozenset[str]()
        return Found(entry, absent, seconds, early)

    def _run(
        self, module: Module, orders: Orders, tell: Callable[[int], None], before: int
    ) -> _Run:
        """Run the process, and read what it has said. ``tell`` is told that, and what was found
        ``before``. Raises as :meth:`analyse` does.
        """
        with ExitStack() as files:
            given = files.enter_context(os.fdopen(os.memfd_create("orders"), "w+b"))
            given.write(msgspec.json.encode(orders))
            given.flush()
            answer = memory_file("answer")
            files.callback(os.close, answer)
            said = files.enter_context(os.fdopen(os.memfd_create("messages"), "w+b"))
            numbers = given.fileno(), module.file, answer
            child = subprocess.Popen(
                [sys.executable, *_WORKER, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said.fileno(),
                cwd="/",
                env=python_environment(),
                pass_fds=numbers,
                start_new_session=True,
            )
            code, seconds, overdue = self._waited(
                child, orders.seconds, answer, lambda count: tell(before + count)
            )
            run = _read(answer, orders)
            run.code, run.seconds, run.overdue = code, seconds, overdue and not run.done
            if not (run.done or run.failed or code < 0 or overdue):
                text = printable(os.pread(said.fileno(), 4096, 0)).strip()
                _log.error("the process that analyses modules has failed: %s", text)
            return run

    def _waited(
        self,
        child: "subprocess.Popen[bytes]",
        seconds: int,
        answer: int,
        tell: Callable[[int], None],
    ) -> tuple[int, float, bool]:
        """Wait for the process. Return its exit status or, negative, the signal that ended it, the
        processor time of it and of the tools that it ran, and whether it was not waited for to the
        end.
        """
        end = time.monotonic() + _TIMEOUT_FACTOR * seconds
        told = 0
        try:
            while not (ended := os.wait4(child.pid, os.WNOHANG))[0]:
                if self._stopped.wait(_LOOK_SECONDS) or time.monotonic() > end:
                    break
                if (size := os.fstat(answer).st_size) != told:
                    told = size
                    tell(_count(answer, size))
            overdue = not ended[0]
        finally:
            if not ended[0]:  # its group is not the number of another one yet
                os.killpg(child.pid, signal.SIGKILL)
                ended = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(ended[1])
        used = ended[2].ru_utime + ended[2].ru_stime
        return child.returncode, used, overdue


def _count(answer: int, size: int) -> int:
    """Return how many kernels an answer has so far, roughly: the lines of it."""
    return os.pread(answer, min(size, 1 << 20), 0).count(b"\n")


def _read(answer: int, orders: Orders) -> _Run:
    """Read what a process has said, as far as it can be taken for what it may say."""
    run = _Run()
    names = None if orders.names is None else frozenset(orders.names)
    for text in os.pread(answer, min(os.fstat(answer).st_size, _ANSWER_BYTES), 0).split(b"\n")[:-1]:
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            run.failed, run.why = State.CRASHED, "what reads it says what it may not say"
            break
        if line.missing:
            raise Internal(
                _text(line.missing), hint=_text(line.hint), reason=Reason.MISSING_PACKAGE
            )
        if line.begun:
            run.begun = tuple(name for name in line.begun if names is None or name in names)
        elif line.facts is not None:
            if (names is None or line.kernel in names) and _fits(line.facts, orders):
                run.kernels[line.kernel] = _clean(line.facts)
        elif line.failed:
            run.failed, run.why = line.failed, line.why
        run.done = run.done or line.done
        if len(run.kernels) > MOST_KERNELS:
            run.failed, run.why = State.TOO_LARGE, f"it has more than {MOST_KERNELS} kernels"
            break
    return run


def _fits(facts: KernelFacts, orders: Orders) -> bool:
    """Return whether a kernel's table is one of the module."""
    if not facts.table:
        return True
    try:
        merged(orders.module, orders.architecture, [facts.table])
    except PhosError:
        return False
    return True


def _clean(facts: KernelFacts) -> KernelFacts:
    return msgspec.structs.replace(
        facts,
        unknown_reads=tuple(map(_text, facts.unknown_reads)),
        unknown_writes=tuple(map(_text, facts.unknown_writes)),
    )


def _text(raw: str) -> str:
    """Return a text of the process without what could steer a terminal."""
    return printable(raw.replace("\n", " ").encode(errors="replace"))[:300]


def _end(run: _Run, seconds: int) -> tuple[State, str]:
    """Say how a process ended that had not finished."""
    if run.overdue:
        return State.TOO_LONG, "the machine was too busy"
    if -run.code == signal.SIGXCPU:
        return State.TOO_LONG, f"it takes more than {seconds} s"
    if -run.code in (signal.SIGKILL, signal.SIGXFSZ):
        return State.TOO_LARGE, "it needs more memory than there is for it"
    return State.CRASHED, "what reads it has crashed"
