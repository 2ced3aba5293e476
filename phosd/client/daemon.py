"""Reach phosd over D-Bus. The one place of the clients that knows its paths."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from phosd.bus import NAME, ROOT, CallError, Connection, Signal
from phosd.client.arguments import spelled
from phosd.errors import NoDaemon
from phosd.interface.manager import MANAGER
from phosd.interface.methods import GPU, JOB
from phosd.interface.model import Interface

DBUS = "org.freedesktop.DBus"
PROPERTIES = f"{DBUS}.Properties"
OBJECTS = f"{DBUS}.ObjectManager"
NOBODY = (".ServiceUnknown", ".NameHasNoOwner")
"""Ends of the names of errors that say that phosd does not run."""
ENDS = ("done", "failed", "cancelled")
"""Final states of a job."""
RULES = (
    f"type='signal',sender='{NAME}',path_namespace='{ROOT}'",
    f"type='signal',sender='{DBUS}',member='NameOwnerChanged',arg0='{NAME}'",
)
"""What selects the signals of phosd, and of its start and end."""
_PASSWORD_SECONDS = 330.0
"""Longer than phosd waits for a password."""
_NEWS_SECONDS = 10.0
"""Seconds without news of a job after which phosd is asked."""
_BATCH_SECONDS = 0.1
"""Seconds for which changes are collected before their objects are read."""
NO_BUS = Signal("", "", "")
"""Stands for a signal when the connection to the bus is lost."""

Properties = dict[str, Any]
"""What the bus tells of an object: plain values by the names of D-Bus properties."""
News = asyncio.Queue[Signal]


def job_path(number: int) -> str:
    """Return the path of a job."""
    return f"{ROOT}/job/_{number}"


class Managed(dict[str, dict[str, Properties]]):
    """Objects by path, each with its interfaces, as the bus lists them."""

    def of(self, stated: Interface) -> list[Properties]:
        """Return the properties of all objects with this interface."""
        return [self.at(path, stated) for path in self if stated.name in self[path]]

    def gpus_of(self, process: Properties) -> list[Properties]:
        """Return the GPUs that a process uses, by number."""
        found = (gpu for gpu in self.of(GPU) if gpu["Path"] in process["GPUs"])
        return sorted(found, key=lambda gpu: int(gpu["Ordinal"]))

    def at(self, path: str, stated: Interface) -> Properties:
        """Return the properties of one object. Raises :class:`CallError` if it is gone."""
        found = self.get(path, {}).get(stated.name)
        if found is None:
            raise CallError(f"{DBUS}.Error.UnknownObject", f"there is no object {path}")
        return {"Path": path} | found


class Daemon:
    """phosd, behind a connection to a bus. Calls raise :class:`CallError`.

    ``interactive``: polkit may ask the user for a password. Use it on the event loop of the
    connection only.
    """

    def __init__(self, connection: Connection, *, interactive: bool = False) -> None:
        self.connection = connection
        self._interactive = interactive
        self._listens = asyncio.Lock()
        self._loss: asyncio.Task[None] | None = None
        self._listeners: set[News] = set()

    @classmethod
    async def open(cls, bus: str, *, interactive: bool = False) -> "Daemon":
        """Connect to ``system``, ``session`` or an address. Raises :class:`NoBusError`."""
        return cls(await Connection.open(bus), interactive=interactive)

    def close(self) -> None:
        """Leave the bus."""
        self.connection.close()

    async def call(self, path: str, interface: str, member: str, *args: Any) -> list[Any]:
        """Call a method that may need authorisation, ``args`` being its signature and arguments,
        and return the values of its reply.
        """
        if not self._interactive:
            return await self.connection.call(path, interface, member, *args)
        return await self.connection.call(
            path, interface, member, *args, interactive=True, patience=_PASSWORD_SECONDS
        )

    async def ask(
        self, path: str, stated: Interface, member: str, /, *args: Any, **options: Any
    ) -> Any:
        """Call a method of an object, and return the value of its reply, or None."""
        values = await self.call(path, *spelled(stated, member, *args, **options))
        return values[0] if values else None

    async def properties(self, path: str, interface: str) -> Properties:
        """Return the properties of an object; ``interface`` may be left empty."""
        (values,) = await self.connection.call(path, PROPERTIES, "GetAll", "s", interface)
        return dict(values)

    async def managed(self, *refresh: str) -> Managed:
        """Return all objects that the caller may see, refreshed by the lists ``refresh``."""
        for member in refresh:
            await self.connection.call(ROOT, MANAGER.name, member)
        (found,) = await self.connection.call(ROOT, OBJECTS, "GetManagedObjects")
        return Managed(found)

    async def owner(self) -> str:
        """Return the connection of the phosd that runs. Raises :class:`CallError` if none does:
        to call it could start it, although it was stopped on purpose.
        """
        (name,) = await self.connection.call(
            "/org/freedesktop/DBus", DBUS, "GetNameOwner", "s", NAME, destination=DBUS
        )
        return str(name)

    @asynccontextmanager
    async def news(self) -> AsyncIterator[News]:
        """Queue the signals of phosd, of its start and its end, and last :data:`NO_BUS` when the
        connection is lost, until the end of the block.

        Anybody may send signals that look like phosd's, so ask phosd for what they are about.
        """
        async with self._listens:
            if self._loss is None:
                await self.connection.subscribe(self._deliver, *RULES)
                self._loss = asyncio.create_task(self.connection.closed())
                self._loss.add_done_callback(lambda _: self._deliver(NO_BUS))
        news: News = asyncio.Queue()
        self._listeners.add(news)
        if self._loss.done():
            news.put_nowait(NO_BUS)
        try:
            yield news
        finally:
            self._listeners.remove(news)

    def _deliver(self, signal: Signal) -> None:
        for news in self._listeners:
            news.put_nowait(signal)

    async def follow(self, path: str) -> AsyncGenerator[Properties, None]:
        """Yield the properties of a job at every change, at last when it has ended. Raises
        :class:`NoDaemon` if phosd or the bus goes away before.
        """
        async with self.news() as news:
            job = await self._job(path)
            yield job
            while job["State"] not in ENDS:
                with suppress(TimeoutError):  # a bus that has too much to deliver loses signals
                    async with asyncio.timeout(_NEWS_SECONDS):
                        await _until_news_of(path, news)
                before, job = job, await self._job(path)
                if job != before:
                    yield job

    async def _job(self, path: str) -> Properties:
        try:
            return await self.properties(path, JOB.name)
        except CallError as error:
            if error.name.endswith(".Disconnected"):
                raise _without_bus(path) from error
            # A new phosd, perhaps started by this very call, does not know the job.
            if error.name.endswith((".NoReply", ".ServiceUnknown", ".UnknownObject")):
                raise _gone(path) from error
            raise


async def _until_news_of(path: str, news: News) -> None:
    while True:
        heard = await news.get()
        if heard is NO_BUS:
            raise _without_bus(path)
        if ended_or_began(heard):
            raise _gone(path)
        if heard.path == path or heard.member == "JobRemoved":
            return


def ended_or_began(heard: Signal) -> bool:
    """Whether the bus says that phosd has ended, or another one has begun."""
    owner_changed = (heard.sender, heard.member) == (DBUS, "NameOwnerChanged")
    return owner_changed and heard.args[0] == NAME


def _without_bus(path: str) -> NoDaemon:
    return NoDaemon(
        f"the connection to the bus was lost during {path}",
        hint="the job goes on, and `phos jobs` shows it when the bus is back",
    )


def _gone(path: str) -> NoDaemon:
    return NoDaemon(
        f"phosd ended while it worked on {path}",
        hint="`phos history` shows what became of the job",
    )


async def touched(news: News) -> set[str]:
    """Wait for signals, and return the paths that they are about. Raises
    :class:`~phosd.errors.NoDaemon`.
    """
    heard = [await news.get()]
    await asyncio.sleep(_BATCH_SECONDS)
    while not news.empty():
        heard.append(news.get_nowait())
    paths = set()
    for signal in heard:
        if signal is NO_BUS:
            raise NoDaemon("the connection to the bus was lost", hint="connect again")
        if ended_or_began(signal):
            raise NoDaemon("phosd has ended", hint="ask again when it runs")
        about = signal.path
        if signal.interface == OBJECTS and signal.signature.startswith("o"):
            about = signal.args[0]
        if about != ROOT and about.startswith(ROOT):
            paths.add(about)
    return paths
