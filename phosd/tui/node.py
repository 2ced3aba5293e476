"""Mirror the node for the screens: records, the contact to phosd, and calls.

Everything runs on the screens' event loop, and nothing blocks: records come in batches from a
:class:`Link`, whose calls are awaited by their callers.
"""

import asyncio
import enum
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from phosd.bus import ROOT
from phosd.client.arguments import spelled
from phosd.client.errors import CommandError
from phosd.client.past import past_job
from phosd.client.records import Gpu, Image, Job, Manager, Pool, Process, Record
from phosd.client.rows import read_pages
from phosd.client.storage import Storage
from phosd.interface.manager import MANAGER
from phosd.interface.methods import INTERFACES, RECORDS
from phosd.interface.model import Interface
from phosd.protection import is_failure

_LOOK_SECONDS = 0.1
"""Seconds between two looks whether a job has ended."""
LATELY = 86_400.0
"""Seconds in which a failed job counts as new."""
_MOST_FAILED = 500
SAMPLES = 150
"""Samples to keep of each GPU: five minutes, one every two seconds."""


class Contact(enum.Enum):
    """State of the contact to phosd."""

    SEEKING = "seeking"
    HERE = "here"
    GONE = "gone"


class Noted:
    """Marker in a change set: the event log has new rows."""


@dataclass(frozen=True)
class Update:
    """Changes reported by a :class:`Link`. ``whole``: the records replace all earlier ones.
    ``trouble`` says why there is no contact, and what to do.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    whole: bool = False
    noted: bool = False
    """Whether the event log has new rows."""
    contact: Contact | None = None
    trouble: str = ""


@dataclass(frozen=True)
class Sample:
    """Figures of a GPU at one time (seconds since the epoch)."""

    time: float
    utilisation: float | None
    memory_used: int
    temperature: float | None
    power: float | None


@dataclass(frozen=True)
class Waiting:
    """A call of ``member``, unanswered since a time (seconds since the epoch)."""

    member: str
    since: float


def _sample(time: int, load: float, memory: int, temperature: float, power: float) -> Sample:
    """Convert a row of ``ListSamples``, in which unknown figures are negative."""
    known = [figure if figure >= 0 else None for figure in (load, temperature, power)]
    return Sample(time / 1e6, known[0], memory, known[1], known[2])


class Link(Protocol):
    """A connection to phosd."""

    async def call(
        self, path: str, interface: str, member: str, signature: str = "", *args: Any
    ) -> list[Any]:
        """Call a method and return the values of its reply. Raises ``CommandError``."""

    def start(self, deliver: Callable[[Update], None]) -> None:
        """Deliver the state of the node and its changes, until :meth:`stop`."""

    def stop(self) -> None:
        """Stop delivering."""


Listener = Callable[[frozenset[type]], None]
"""Called with the kinds of records that changed; :class:`Contact` stands for the contact to phosd,
and :class:`Noted` for new events.
"""
_R = TypeVar("_R", bound=Record)


class Node:
    """A mirror of the node, and the calls of phosd. ``now`` is the clock: seconds since the epoch.
    ``name`` is what the node is called (empty: not shown), and ``here`` whether it is this machine,
    whose files can be read.

    A call raises :class:`CommandError`, whose message says what to do next.
    """

    def __init__(
        self,
        link: Link,
        now: Callable[[], float] = time.time,
        *,
        name: str = "",
        here: bool = True,
    ) -> None:
        self._link = link
        self.now = now
        self.name = name
        self.here = here
        self.contact = Contact.SEEKING
        self.trouble = ""
        self.since = now()
        """Time since which ``contact`` is as it is."""
        self.heard = 0.0
        """Time of the last message from phosd; 0: never."""
        self._unanswered: dict[object, Waiting] = {}
        self.samples: dict[str, deque[Sample]] = {}
        """Samples by path of the GPU, oldest first."""
        self._records: dict[type, dict[str, Any]] = {
            kind: {} for kind in (Manager, Gpu, Process, Image, Pool, Job)
        }
        self._busy: dict[str, Job] = {}
        self._by_pid: dict[int, Process] = {}
        self._by_id: dict[str, Image] = {}
        self.changes: Counter[type] = Counter()
        """How often records of a kind have changed."""
        self._holders: dict[str, list[Process]] | None = None
        self.storage: Storage | None = None
        """How full the disk of the images is; None: phosd does not tell."""
        self._failed: dict[int, float] = {}
        """When past jobs failed, by number."""
        self._listeners: list[Listener] = []

    # Reading the mirror

    def of(self, kind: type[_R]) -> Mapping[str, _R]:
        """Return all records of a kind, by path."""
        return self._records[kind]

    @property
    def manager(self) -> Manager:
        """The service; an empty record before the first contact."""
        return next(iter(self.of(Manager).values()), Manager(ROOT))

    def memory_used(self, gpu: Gpu) -> int:
        """Return the bytes of a GPU in use: NVML's figure, else the sum over the visible
        processes.
        """
        if gpu.memory_used:
            return gpu.memory_used
        return sum(p.device_bytes for p in self.holders(gpu) if len(p.gpus) < 2)

    def holders(self, gpu: Gpu) -> list[Process]:
        """Return the processes that use a GPU: as their hooks say, or the GPU."""
        if self._holders is None:
            self._holders = {
                path: [self._by_pid[pid] for pid in each.pids if pid in self._by_pid]
                for path, each in self.of(Gpu).items()
            }
            for process in self._by_pid.values():
                for path in process.gpus:
                    held = self._holders.setdefault(path, [])
                    if process.pid not in self.of(Gpu).get(path, gpu).pids:
                        held.append(process)
        return self._holders.get(gpu.path, [])

    def gpus_of(self, process: Process) -> list[Gpu]:
        """Return the GPUs that a process uses, by number."""
        return [gpu for gpu in self.gpus if gpu.path in process.gpus or process.pid in gpu.pids]

    @property
    def gpus(self) -> list[Gpu]:
        """The GPUs in order of their ordinals."""
        return sorted(self.of(Gpu).values(), key=lambda gpu: (gpu.ordinal, gpu.uuid))

    def process(self, pid: int) -> Process | None:
        """Return the process with this pid."""
        return self._by_pid.get(pid)

    def image(self, image: str) -> Image | None:
        """Return the image with this id."""
        return self._by_id.get(image)

    @property
    def waiting(self) -> Waiting | None:
        """The oldest unanswered call."""
        return next(iter(self._unanswered.values()), None)

    def job_of(self, target: str) -> Job | None:
        """Return the job that works on a pid or an image now, else the first that waits to."""
        return self._busy.get(target)

    @property
    def active_jobs(self) -> list[Job]:
        """The running and waiting jobs, by number."""
        return sorted(
            (job for job in self.of(Job).values() if not job.over), key=lambda job: job.number
        )

    # Changes

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` after every change."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Start mirroring."""
        self._link.start(self.apply)

    def stop(self) -> None:
        """Stop mirroring."""
        self._link.stop()

    def apply(self, update: Update) -> None:
        """Apply an update of the link and notify the listeners."""
        changed: set[type] = set()
        if update.whole:
            for kind, records in self._records.items():
                if records:
                    changed.add(kind)
                records.clear()
        for path, record in update.records.items():
            self._records[type(record)][path] = record
            changed.add(type(record))
        for path in update.gone:
            for kind, records in self._records.items():
                if records.pop(path, None) is not None:
                    changed.add(kind)
        if changed or update.contact is Contact.HERE:
            self.heard = self.now()
        if update.noted:
            changed.add(Noted)
        if update.contact is not None:
            if update.contact is not self.contact:
                self.since = self.now()
            self.contact, self.trouble = update.contact, update.trouble
            changed.add(Contact)
        self.changes.update(changed)
        if changed & {Process, Gpu}:
            self._holders = None
        if Process in changed:
            self._by_pid = {process.pid: process for process in self.of(Process).values()}
        if Image in changed:
            self._by_id = {image.id: image for image in self.of(Image).values()}
        if Job in changed:
            waiting_first = sorted(self.active_jobs, key=lambda job: (job.state, -job.number))
            self._busy = {target: job for job in waiting_first for target in job.targets}
        if update.whole:
            self.storage, self._failed = None, {}
        self._tell(frozenset(changed))

    def sample(self) -> None:
        """Record a sample of each GPU. Call it every two seconds."""
        if self.contact is not Contact.HERE:
            return
        gpus = self.of(Gpu)
        self.samples = {path: self.samples.get(path, deque(maxlen=SAMPLES)) for path in gpus}
        for path, gpu in gpus.items():
            self.samples[path].append(
                Sample(self.now(), gpu.utilisation, gpu.memory_used, gpu.temperature, gpu.power)
            )

    async def recall(self) -> None:
        """Fetch the samples that phosd took before this client started."""
        if "gpu-samples" not in self.manager.features:
            return
        for gpu in self.gpus:
            with suppress(CommandError):  # a GPU without NVML has none
                rows = await self.ask(gpu, "ListSamples")
                own = self.samples.setdefault(gpu.path, deque(maxlen=SAMPLES))
                first = own[0].time if own else self.now()
                before = [sample for row in rows if (sample := _sample(*row)).time < first]
                self.samples[gpu.path] = deque([*before, *own], maxlen=SAMPLES)
        self._tell(frozenset({Gpu}))

    async def survey(self) -> None:
        """Ask how full the disk is, and which jobs failed lately: as far as phosd tells it."""
        if self.contact is not Contact.HERE:
            return
        with suppress(CommandError):
            if "storage" in self.manager.features:
                self.storage = Storage(*await self._quietly("GetStorage"))
            if "history-filters" in self.manager.features:
                since = int((self.now() - LATELY) * 1e6)
                rows = await self._quietly(
                    "ListHistory", state="failed", since=since, limit=_MOST_FAILED
                )
                past = [job for job in map(past_job, rows) if is_failure(job.error)]
                self._failed = {job.number: job.ended or 0.0 for job in past}
        self._tell(frozenset({Storage}))

    @property
    def failures(self) -> int:
        """How many jobs failed in the last 24 hours, as far as is known."""
        first = self.now() - LATELY
        failed = self._failed | {
            job.number: job.ended or 0.0
            for job in self.of(Job).values()
            if job.state == "failed" and is_failure(job.error)
        }
        return sum(ended >= first for ended in failed.values())

    async def _quietly(self, member: str, **options: Any) -> Any:
        """Call a method of the manager for what may come late: nobody is told of the wait."""
        (found,) = await self._link.call(ROOT, *spelled(MANAGER, member, **options))
        return found

    def _tell(self, changed: frozenset[type]) -> None:
        if changed:
            for listener in list(self._listeners):
                listener(changed)

    async def ended(self, path: str) -> Job | None:
        """Wait until a job has ended; None if phosd does not know it any more."""
        while (job := self.of(Job).get(path)) is not None and not job.over:
            await asyncio.sleep(_LOOK_SECONDS)
        return job

    async def call(self, member: str, /, *args: Any, **options: Any) -> Any:
        """Call a method of the manager, and return the value of its reply, or None."""
        return await self._call(ROOT, MANAGER, member, *args, **options)

    async def ask(self, record: Record, member: str, /, *args: Any, **options: Any) -> Any:
        """Call a method of the object of a record in the same way."""
        (stated,) = (each for each in INTERFACES if RECORDS[each.name] is type(record))
        return await self._call(record.path, stated, member, *args, **options)

    async def history(self, limit: int, **options: int | str) -> list[Mapping[str, Any]]:
        """Return at most ``limit`` past jobs, newest first, as rows of ``ListHistory``."""
        return await read_pages(partial(self.call, "ListHistory"), limit, **options)

    async def _call(
        self, path: str, stated: Interface, member: str, /, *args: Any, **options: Any
    ) -> Any:
        with self._waits(member):
            values = await self._link.call(path, *spelled(stated, member, *args, **options))
        return values[0] if values else None

    @contextmanager
    def _waits(self, member: str) -> Iterator[None]:
        call = object()
        self._unanswered[call] = Waiting(member, self.now())
        self._tell(frozenset({Contact}))
        try:
            yield
        finally:
            del self._unanswered[call]
            self._tell(frozenset({Contact}))
