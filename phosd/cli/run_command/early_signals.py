"""Take SIGTERM and Ctrl-C from the first moment on, before there is a program to give them to."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from phosd.errors import PhosError

# Most programs run without phosd, and need no client.
if TYPE_CHECKING:
    from phosd.client import JobHandle


class EarlySignals:
    """What comes inside this context before the program is followed (``relay.follow``).

    Until :meth:`begin` there is nothing to lose: a signal ends this program, SIGTERM with the exit
    code ``on_term``. From then on the first signal is kept in ``asked``, and cancels the job that
    restores the program.
    """

    def __init__(self, on_term: int) -> None:
        self._exits = {signal.SIGTERM: on_term, signal.SIGINT: 128 + signal.SIGINT}
        self._begun = False
        self._job: JobHandle | None = None
        self._before: dict[int, Any] = {}
        self.asked = 0

    def __enter__(self) -> Self:
        for number in self._exits:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        # A step of Slurm's begins with SIGTERM blocked, and perhaps pending (phosd/slurm_plugin).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._exits)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def exit_code(self) -> int:
        """The exit code when the signal that came has kept the program from running."""
        return self._exits[signal.Signals(self.asked)]

    def begin(self) -> None:
        """Keep signals from now on: the program is about to be started or restored."""
        self._begun = True

    def end(self) -> None:
        """Ignore SIGTERM from now on, also after this context: the program has ended, and whoever
        waits for it is to get its exit code.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._before.pop(signal.SIGTERM, None)

    @contextmanager
    def cancelling(self, job: "JobHandle") -> Iterator[None]:
        """Let a signal cancel this job inside the context, also one that has come since
        :meth:`begin`. One that comes afterwards is only kept: the job's client may be closed by
        then, and a handler that asks it would wait for ever.
        """
        self._job = job
        try:
            if self.asked:
                self._cancel()
            yield
        finally:
            self._job = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        again = self.asked
        self.asked = self.asked or number
        if not self._begun:
            sys.exit(self.exit_code)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not again:
            self._cancel()

    def _cancel(self) -> None:
        if self._job is not None:
            with suppress(PhosError):  # it has just ended
                self._job.cancel()
