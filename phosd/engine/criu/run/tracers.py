"""Make CRIU let the driver's restore threads run, while it holds all other threads of trees.

The driver does the work of its checkpoint and restore in a thread of the process itself, and every
other thread has to stand still meanwhile (hazard 38). CRIU is the tracer of all of them, so it is
CRIU that lets these threads run, by its plugin; phosd calls the driver, for all trees at once. The
messages are described in ``criu_plugin/restore_threads.cpp``.

A user's CRIU belongs to the user, who can make it say anything. So it only says how far it is:
processes and threads are named by phosd alone.
"""

import contextlib
import enum
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from phosd import unix_sockets
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.system.procfs import own_id
from phosd.errors import Timeout

RESTORE_SECONDS = 300.0
"""Seconds that the driver may take to restore processes, even if the job's deadline has passed."""

_LOOK_MILLISECONDS = 50
_LONGEST = 16
"""Bytes of the longest message from CRIU."""
_IGNORED = 4
"""Messages of the turn before that may still be read, if that turn was given up."""


class Turn(enum.Enum):
    """What the restore threads run for."""

    CHECKPOINT = "c"
    RESTORE = "r"


class Tracer(CriuPart):
    """The CRIU that traces a tree; ``pids`` are the tree's GPU processes, once there are any."""

    def __init__(self, pids: Callable[[], Collection[int]], deadline: float) -> None:
        self.pids = pids
        self._ours, self._theirs = unix_sockets.pair(socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._deadline = deadline
        self._ignored = 0
        self.gone = False
        """Whether CRIU has ended, has said what it must not say, or was let alone."""
        self.waits = False
        """Whether CRIU waits for phosd, so that doing nothing is right."""

    @property
    def plugged(self) -> bool:
        return True

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "PHOS_DRIVER_PEER": str(self._theirs.fileno()),
            # Until then a phosd that hangs may keep the program from running.
            "PHOS_DRIVER_SECONDS": str(int(self._deadline + 2 * RESTORE_SECONDS)),
        }

    @property
    def descriptors(self) -> Sequence[int]:
        return [self._theirs.fileno()]

    def started(self) -> None:
        """Close CRIU's end here, once CRIU has it: its end is noticed then."""
        unix_sockets.let_go(self._theirs.detach())

    def fileno(self) -> int:
        """Return a descriptor that is readable when CRIU has said something, or has ended."""
        return self._ours.fileno()

    def say(self, turn: Turn, word: str) -> None:
        """Say a word of this turn to CRIU, if it is there."""
        if self.gone:
            return
        try:
            self._ours.send(f"{turn.value} {word}".encode())
        except OSError:  # it has ended, or does not read
            self.leave()

    def heard(self, turn: Turn) -> str:
        """Return what CRIU has said in this turn; empty if nothing, or if it is gone."""
        while not self.gone:
            try:
                text = unix_sockets.receive(self._ours, _LONGEST).decode(errors="replace")
            except BlockingIOError:
                return ""
            except OSError:
                text = ""
            name, _, word = text.partition(" ")
            if name == turn.value and word:
                return word
            self._ignored += 1
            if not text or self._ignored > _IGNORED:
                self.leave()
        return ""

    def leave(self) -> None:
        """Say nothing any more: CRIU goes on, whatever it waits for."""
        self.gone = True
        self.waits = False
        with contextlib.suppress(OSError):  # it is not connected any more
            self._ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.leave()
        unix_sockets.close(self._theirs)
        unix_sockets.close(self._ours)

    def __exit__(self, *_: object) -> None:
        self.close()


def checkpoint_turn(
    tracers: Sequence[Tracer],
    threads: Callable[[], Mapping[int, int]],
    work: Callable[[], None],
    check: Callable[[], None],
    until: float,
) -> bool:
    """Call ``work`` when all trees are frozen, while only their restore ``threads`` run.

    These are by process. ``check`` is called while this waits for CRIU, and may raise. ``until`` is
    a time of :func:`time.monotonic`: work that takes longer goes on without threads being held.
    Returns False if a CRIU has failed before. Raises what ``work`` raises, and :class:`Timeout`.
    Unless this returns True, CRIU gives up.
    """
    turn, done = Turn.CHECKPOINT, False
    try:
        if not _gather(turn, tracers, ("ready",), check):
            return False
        _let_run(turn, tracers, threads())
        if not _gather(turn, tracers, ("runs",), check):
            return False
        with _limited(tracers, until):
            work()
        done = True
        return True
    finally:
        _end(turn, tracers, "hold" if done else "give-up")


def restore_turn(
    tracers: Sequence[Tracer],
    threads: Callable[[], Mapping[int, int]],
    work: Callable[[], None],
    check: Callable[[], None],
    failed: Callable[[], None] = lambda: None,
) -> None:
    """Call ``work`` when CRIU has done its own, while only the restore ``threads`` run.

    All threads run of a tree whose CRIU is gone. ``check`` is as for :func:`checkpoint_turn`;
    ``failed`` is called if a CRIU has failed.
    """
    turn = Turn.RESTORE
    try:
        _gather(turn, tracers, ("ready", "failed"), check, failed)
        living = [tracer for tracer in tracers if not tracer.gone]
        if living:
            _let_run(turn, living, threads())
            _gather(turn, living, ("runs",), check)
        with _limited(living, time.monotonic() + RESTORE_SECONDS):
            work()
    finally:
        _end(turn, tracers, "hold")


def _gather(
    turn: Turn,
    tracers: Sequence[Tracer],
    words: Collection[str],
    check: Callable[[], None],
    failed: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until each CRIU has said one of the words, or is gone.

    Returns whether none is gone or says that it failed; otherwise ``failed`` was called.
    """
    waiting, well = list(tracers), True
    while waiting:
        poller = select.poll()
        for tracer in waiting:
            poller.register(tracer, select.POLLIN)
        poller.poll(_LOOK_MILLISECONDS)
        check()
        for tracer in tuple(waiting):
            word = tracer.heard(turn)
            if word and word not in words:
                tracer.leave()
            if word or tracer.gone:
                waiting.remove(tracer)
                tracer.waits = not tracer.gone
            if tracer.gone or word == "failed":
                well = False
                failed()
    return well


def _let_run(turn: Turn, tracers: Sequence[Tracer], threads: Mapping[int, int]) -> None:
    for tracer in tracers:
        # CRIU is in their pid namespace.
        named = (f"{own_id(pid)}:{own_id(threads[pid])}" for pid in sorted(tracer.pids()))
        tracer.say(turn, " ".join(("run", *named)))


def _end(turn: Turn, tracers: Sequence[Tracer], word: str) -> None:
    for tracer in tracers:
        tracer.say(turn, word)
        tracer.waits = False


@contextlib.contextmanager
def _limited(tracers: Sequence[Tracer], until: float) -> Iterator[None]:
    """Leave the tracers if the block takes too long: a thread that the driver waits for may be one
    of those that are held. Raises :class:`Timeout` at the end of the block.
    """
    late = threading.Event()

    def leave() -> None:
        late.set()
        for tracer in tracers:
            tracer.leave()

    timer = threading.Timer(max(0.0, until - time.monotonic()), leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if late.is_set():
        raise Timeout(
            "the driver did not checkpoint or restore the program in time",
            hint="the program goes on; try again, or start it under `phos run`",
        )
