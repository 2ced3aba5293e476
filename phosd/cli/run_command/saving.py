"""Save and end a program when SIGTERM comes, within the time that there is."""

import threading
import time
from enum import Enum, auto

from phosd.cli.run_command.grace import Grace
from phosd.cli.run_command.scontrol import SlurmError
from phosd.cli.run_command.termination import TermHolder, deliver, deliver_if_held, not_holding
from phosd.cli.settings import Settings
from phosd.client import Client, Job, JobHandle
from phosd.client.errors import in_words
from phosd.client.options import CheckpointOptions
from phosd.engine.program.tree import scan
from phosd.errors import Busy, OutOfMemory, PhosError

_AGAIN_SECONDS = 0.5
_SETTLE_SECONDS = 30.0
"""How long phosd may take to tell what has come of saving, when the program has ended."""
_ALONE_SECONDS = 1.0
"""How long after a process of the program has got a SIGTERM this one may get it, too."""
_FOR_ITS_HANDLER = 0.2
_MOST_FOR_ITS_HANDLER = 10.0
"""The part of the grace, and the seconds at most, that the program has if it cannot be saved."""
_FOR_CALLBACKS = 0.5
"""The part of the time that a program with safe points may take to come to one."""


class _State(Enum):
    RUNS = auto()
    SAVING = auto()
    FAILED = auto()
    TERMINATED = auto()


class SaveOnTerm:
    """A policy of the relay: SIGTERM saves and ends the program within the ``grace``.

    A program that cannot be saved in time gets the SIGTERM after all. ``in_memory``: it is ended as
    soon as its image is in memory. ``named``: with a name, by which the same command finds it.
    """

    def __init__(
        self,
        settings: Settings,
        holder: TermHolder,
        grace: Grace,
        *,
        in_memory: bool,
        named: bool,
    ) -> None:
        self.holder = holder
        self._settings = settings
        self._pid = 0
        self._grace = grace
        self._in_memory = in_memory
        self._named = named
        self._state = _State.RUNS
        self._asked = False
        self._deadline = 0.0
        self._held: dict[int, float] = {}
        self._thread: threading.Thread | None = None
        self._job: JobHandle | None = None
        self._saved = ""

    @property
    def gave_up(self) -> bool:
        """Whether the program got the SIGTERM, as it could not be saved."""
        return self._state is _State.TERMINATED

    @property
    def began(self) -> bool:
        """Whether it was asked to save the program."""
        return self._state is not _State.RUNS

    def take(self, pid: int) -> None:
        """Take the first process of the program, before the first :meth:`look`."""
        self._pid = pid

    def on_term(self) -> None:
        """Take a SIGTERM. Another one while the program is saved changes nothing."""
        self._asked = True

    def look(self) -> None:
        """Begin to save, or let the program have its signals."""
        now = time.monotonic()
        for pid in self.holder.newly_held(self._pid):
            self._held.setdefault(pid, now)
        if self._state is _State.RUNS:
            if self._asked or self._pid in self._held:
                self._begin(now)
            else:
                self._let_single_ones_through(now)
        elif self._state is _State.FAILED or (
            self._state is _State.SAVING and now > self._deadline
        ):
            self._terminate()

    def settle(self) -> bool:
        """Return whether the program was saved, when it has ended."""
        if self._thread is not None:
            self._thread.join(_SETTLE_SECONDS)
        if self._saved:
            goes_on = (
                "the same command with --resume" if self._named else f"`phos restore {self._saved}`"
            )
            self._settings.note(f"phos: saved as {self._saved}; {goes_on} goes on from it")
            if self._in_memory:
                self._settings.note(
                    "phos: it is lost if the machine ends before phosd has written it to the disk; "
                    f"`phos images {self._saved}` tells"
                )
        return bool(self._saved)

    def _begin(self, now: float) -> None:
        self._state = _State.SAVING
        seconds = self._grace.seconds
        self._deadline = now + seconds - min(seconds * _FOR_ITS_HANDLER, _MOST_FOR_ITS_HANDLER)
        self._settings.note(f"phos: SIGTERM; saving process {self._pid}, for up to {seconds:.0f} s")
        if others := not_holding(self._pid):
            self._settings.note(
                f"phos: {', '.join(others)} cannot hold SIGTERM, and may end before it is saved"
            )
        self._thread = threading.Thread(target=self._save, name="save", daemon=True)
        self._thread.start()

    def _save(self) -> None:
        try:
            self._take_more_time()
            with Client(self._settings.bus) as client:
                self._saved = self._save_in_time(client).result
        except Exception as error:  # whatever it is, the program is to be told
            if self._state is _State.SAVING:  # and the program has not got its SIGTERM yet
                self._state = _State.FAILED
            self._settings.note(f"phos: not saved: {in_words(error, self._settings.bus)}")

    def _take_more_time(self) -> None:
        """Move the deadline if there is more time than was certain before SIGTERM came."""
        try:
            if more := self._grace.more():
                self._deadline += more
                self._settings.note(f"phos: preempted: there are {more:.0f} s more")
        except SlurmError as why:
            self._settings.note(f"phos: whether there is more time is not known: {why}")

    def _save_in_time(self, client: Client) -> Job:
        """Save and end the program. What is in the way may pass, as long as there is time."""
        options: CheckpointOptions = {"then": "end", "queue": True}
        if self._in_memory:
            options["in_memory"] = True
        told = ""
        while True:
            left = max(self._deadline - time.monotonic(), 1.0)
            try:
                options["callback_deadline"] = left * _FOR_CALLBACKS
                self._job = client.checkpoint(self._pid, **options)
                return self._job.wait()
            except Busy as error:
                if time.monotonic() + _AGAIN_SECONDS > self._deadline:
                    raise
                said = str(error)
            try:
                if self._bring_back(client):
                    continue
            except (Busy, OutOfMemory) as error:  # others on its GPUs may be about to end as well
                said = str(error)
            if said != told:
                self._settings.note(f"phos: not yet: {said}")
                told = said
            time.sleep(_AGAIN_SECONDS)

    def _bring_back(self, client: Client) -> bool:
        """Resume the program if it is suspended, as only one that is on its GPUs can be saved.
        Returns whether it was.
        """
        tree = {each.pid for each in scan(self._pid).living}
        for each in client.processes():
            if each.pid in tree and each.state == "suspended":
                self._settings.note(f"phos: process {each.pid} is suspended; it is resumed first")
                self._job = client.resume(each.pid, queue=True)
                self._job.wait()
                return True
        return False

    def _terminate(self) -> None:
        """Let SIGTERM come to the program; what saves it is cancelled."""
        if self._state is _State.SAVING:
            self._settings.note("phos: not saved in time; the program gets SIGTERM")
            if self._job is not None:
                try:
                    self._job.cancel()
                except PhosError as error:  # it has just ended
                    self._settings.note(f"phos: {error}")
        self._state = _State.TERMINATED
        deliver(self._pid)

    def _let_single_ones_through(self, now: float) -> None:
        """A SIGTERM to one process alone, of somebody who has ended by now, is for that process."""
        for pid, since in list(self._held.items()):
            if now - since > _ALONE_SECONDS:
                del self._held[pid]
                deliver_if_held(pid)
