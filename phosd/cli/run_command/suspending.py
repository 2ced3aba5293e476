"""Take a program off its GPUs while Slurm suspends its job (``scontrol suspend``).

Slurm sends SIGTSTP to the first process of each step, freezes the step two seconds later, and thaws
it and sends SIGCONT when the job is resumed. phosd keeps the step thawed until the program is
off its GPUs; then this process stops the program, also where Slurm has not frozen it yet.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from phosd.cli.settings import Settings
from phosd.client import Client
from phosd.client.errors import in_words
from phosd.engine.program.tree import scan
from phosd.errors import Busy, NoSuchProcess, OutOfMemory, PhosError

_AGAIN_SECONDS = 0.5


class SuspendWithJob:
    """What SIGTSTP and SIGCONT do with the program whose first process is ``pid``."""

    def __init__(self, settings: Settings, pid: int) -> None:
        self._settings = settings
        self._pid = pid
        self._wanted = False
        self._suspended = False
        """Whether the program was taken off its GPUs, and is not back."""
        self._stopped = False
        self._leaving: threading.Thread | None = None
        self._coming: threading.Thread | None = None
        self._asking = threading.Lock()
        """Has phosd get requests in the order in which they are decided on."""

    @property
    def takes(self) -> Mapping[signal.Signals, Callable[[], None]]:
        """What to do in a handler of each signal."""
        return {signal.SIGTSTP: self._on_stop, signal.SIGCONT: self._on_continue}

    def look(self) -> None:
        """Do what is due; called all the time while the program runs.

        The program leaves also while it comes back, as Slurm freezes this process soon.
        """
        if _runs(self._leaving) or self._wanted == self._stopped:
            return
        if self._wanted:
            self._leaving = _started(self._leave)
        elif not _runs(self._coming):
            self._coming = _started(self._come_back)

    def _on_stop(self) -> None:
        self._wanted = True

    def _on_continue(self) -> None:
        self._wanted = False

    def _leave(self) -> None:
        try:
            self._ask_to_leave()
            self._settings.note(f"phos: suspended; process {self._pid} has left its GPUs")
        except Exception as error:  # whatever it is, the program is to stand still
            said = in_words(error, self._settings.bus)
            self._settings.note(f"phos: suspended, but not off its GPUs: {said}")
        self._stopped = True
        self._signal(signal.SIGSTOP)

    def _ask_to_leave(self) -> None:
        """Suspend the program: behind a resumption, if phosd was asked for one and is at it."""
        with Client(self._settings.bus) as client:
            with self._asking:
                coming = self._coming if _runs(self._coming) else None
                job = client.suspend(self._pid, thaw=True, queue=True)
            try:
                job.wait()
            except PhosError:
                if coming is None:
                    raise
                coming.join()
                if not self._suspended:
                    raise
            else:
                if coming is not None:
                    coming.join()
                self._suspended = True

    def _come_back(self) -> None:
        self._stopped = False
        self._signal(signal.SIGCONT)
        told = ""
        while self._suspended:
            try:
                with Client(self._settings.bus) as client:
                    with self._asking:
                        if self._wanted:
                            return
                        job = client.resume(self._pid, queue=True)
                    job.wait()
                self._suspended = False
                self._settings.note(f"phos: resumed; process {self._pid} is on its GPUs again")
            except (Busy, OutOfMemory) as error:  # others on its GPUs may be about to leave
                if str(error) != told:
                    told = str(error)
                    self._settings.note(f"phos: not resumed yet: {told}")
                time.sleep(_AGAIN_SECONDS)
            except Exception as error:
                self._suspended = False
                said = in_words(error, self._settings.bus)
                self._settings.note(
                    f"phos: not resumed: {said}; `phos resume {self._pid}` tries it again"
                )

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the program."""
        with suppress(NoSuchProcess):  # it has ended
            for each in scan(self._pid).living:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, number)


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="suspend", daemon=True)
    thread.start()
    return thread


def _runs(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()
