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
from phosd.errors import Busy, NoSuchProcess, OutOfMemory

_AGAIN_SECONDS = 0.5


class SuspendWithJob:
    """What SIGTSTP and SIGCONT do with the program whose first process is ``pid``."""

    def __init__(self, settings: Settings, pid: int) -> None:
        self._settings = settings
        self._pid = pid
        self._wanted = False
        self._suspended = False
        """Whether the program was taken off its GPUs."""
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def takes(self) -> Mapping[signal.Signals, Callable[[], None]]:
        """What to do in a handler of each signal."""
        return {signal.SIGTSTP: self._on_stop, signal.SIGCONT: self._on_continue}

    def look(self) -> None:
        """Do what is due; called all the time while the program runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._wanted != self._stopped:
            work = self._leave if self._wanted else self._come_back
            self._thread = threading.Thread(target=work, name="suspend", daemon=True)
            self._thread.start()

    def _on_stop(self) -> None:
        self._wanted = True

    def _on_continue(self) -> None:
        self._wanted = False

    def _leave(self) -> None:
        try:
            with Client(self._settings.bus) as client:
                client.suspend(self._pid, thaw=True, queue=True).wait()
            self._suspended = True
            self._settings.note(f"phos: suspended; process {self._pid} has left its GPUs")
        except Exception as error:  # whatever it is, the program is to stand still
            said = in_words(error, self._settings.bus)
            self._settings.note(f"phos: suspended, but not off its GPUs: {said}")
        self._stopped = True
        self._signal(signal.SIGSTOP)

    def _come_back(self) -> None:
        self._stopped = False
        self._signal(signal.SIGCONT)
        told = ""
        while self._suspended and not self._wanted:
            try:
                with Client(self._settings.bus) as client:
                    client.resume(self._pid, queue=True).wait()
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
