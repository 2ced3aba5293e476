"""Relay a program's output and signals, and exit with its status."""

import errno
import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from phosd.cli.run_command.early_signals import EarlySignals

SAVED = 75
"""The exit code when the program was saved and ended: EX_TEMPFAIL, of a job to be started again."""
_POLL_MS = 30
_BLOCK = 1 << 16
_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of a pipe or terminal that is closed: nobody is there who could be told."""


class Relayed(Protocol):
    """A running program. ``outputs`` are the files that it writes its output to, with the number
    of our descriptor for each, and how many bytes are known already.
    """

    @property
    def pid(self) -> int: ...

    @property
    def outputs(self) -> list[tuple[Path, int, int]]: ...

    def status(self) -> int | None:
        """Return how the program has ended, once it has: its exit code, or minus the number of a
        signal; None if that is not known.
        """


class TermPolicy(Protocol):
    """What SIGTERM is to do."""

    def on_term(self) -> None:
        """Take a SIGTERM; in a signal handler."""

    def look(self) -> None:
        """Do what is due; called all the time while the program runs."""


class Looking(Protocol):
    """What else is looked at."""

    def look(self) -> None:
        """Do what is due; called all the time while the program runs."""


class StopPolicy(Protocol):
    """What other signals are to do."""

    @property
    def takes(self) -> Mapping[signal.Signals, Callable[[], None]]:
        """What to do in a handler of each signal."""

    def look(self) -> None:
        """Do what is due; called all the time while the program runs."""


def follow(
    program: Relayed,
    policy: TermPolicy | None,
    early: EarlySignals,
    stops: StopPolicy | None = None,
    room: Looking | None = None,
    note: Callable[[str], None] = lambda _text: None,
) -> int | None:
    """Relay until the program has ended, and return its status. SIGTERM is passed on, or does what
    the ``policy`` says, also one that came ``early``; others do what ``stops`` says. ``room`` is
    that of its output; ``note`` tells the user when the output cannot be shown.
    """
    streams = [_Stream(*output, note) for output in program.outputs]
    try:
        pidfd = os.pidfd_open(program.pid)
    except ProcessLookupError:  # it has ended already
        pass
    else:
        try:
            _relay(program.pid, pidfd, streams, policy, early, stops, room)
        finally:
            os.close(pidfd)
    status = program.status()
    for stream in streams:
        stream.pump()
        stream.close()
    return status


def _relay(
    pid: int,
    pidfd: int,
    streams: "Sequence[_Stream]",
    policy: TermPolicy | None,
    early: EarlySignals,
    stops: StopPolicy | None,
    room: Looking | None,
) -> None:
    """Relay output and signals until the program has ended."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    take = {
        signal.SIGINT: _interrupt(pid, pidfd),
        signal.SIGTERM: policy.on_term if policy is not None else _pass_on(pidfd),
        **(stops.takes if stops is not None else {}),
    }
    with _signals_taken(take):
        if early.asked:
            take[signal.Signals(early.asked)]()
        while not ended.poll(_POLL_MS):
            for stream in streams:
                stream.pump()
            for each in (policy, stops, room):
                if each is not None:
                    each.look()


def exit_code(status: int) -> int:
    """Return the exit code that tells a status, as a shell's does."""
    return status if status >= 0 else 128 - status


class _Stream:
    """A file of the program's output, and the descriptor to which it is copied."""

    def __init__(self, source: Path, target: int, known: int, note: Callable[[str], None]) -> None:
        self._path, self._note = source, note
        self._source = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(self._source, known, os.SEEK_SET)
        self._target = target
        self._wanted = True

    def pump(self) -> None:
        """Copy new output. Once the reader of our output is gone, drop it; the program goes on."""
        while block := os.read(self._source, _BLOCK):
            if not self._wanted:
                continue
            try:
                self._write(block)
            except OSError as error:
                self._wanted = False
                if error.errno not in _CLOSED:
                    self._note(
                        f"phos: the output cannot be shown any more: {error.strerror}; the program "
                        f"goes on, and all of it is in {self._path}"
                    )

    def _write(self, block: bytes) -> None:
        rest = memoryview(block)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:
                select.select([], [self._target], [])

    def close(self) -> None:
        os.close(self._source)


def _interrupt(pid: int, pidfd: int) -> Callable[[], None]:
    """Return what passes Ctrl-C on to the program's process group, as a terminal would."""

    def interrupt() -> None:
        if not select.select([pidfd], [], [], 0)[0]:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGINT)

    return interrupt


def _pass_on(pidfd: int) -> Callable[[], None]:
    def terminate() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)

    return terminate


@contextmanager
def _signals_taken(take: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    def handler(do: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
        return lambda _number, _frame: do()

    before = {}
    for number, do in take.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler(do))
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
