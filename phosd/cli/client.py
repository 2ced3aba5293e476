"""Call phosd over D-Bus, and watch jobs until they end."""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from phosd.bus import NAME, ROOT, CallError, Connection, Signal, Variant
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError

MANAGER = "org.phos.Manager1"
JOB = "org.phos.Job1"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_OBJECTS = "org.freedesktop.DBus.ObjectManager"

_DBUS = "org.freedesktop.DBus"
_NEWS_SECONDS = 10.0
"""Seconds without news of a job after which phosd is asked."""
_PEEK_SECONDS = 2.0
"""Seconds that a completion waits for phosd."""
_NO_BUS = Signal("", "", "")
"""Stands for a signal when the connection to the bus is lost."""
_PASSWORD_SECONDS = 330.0
"""Longer than phosd waits for a password."""

Properties = dict[str, Any]


def call(settings: Settings, member: str, signature: str = "", *args: Any) -> list[Any]:
    """Call a method of Manager1 and return the reply. Raises :class:`CallError`."""

    async def run() -> list[Any]:
        with closing(await Connection.open(settings.bus)) as connection:
            return await _ask(connection, ROOT, MANAGER, member, signature, *args)

    return asyncio.run(run())


def peek(settings: Settings, member: str) -> list[Any]:
    """Call a method of Manager1 that lists something, if phosd runs, and return the list. Nothing
    is started, and phosd has two seconds. Raises :class:`CallError` and :class:`NoBusError`.
    """

    async def run() -> list[Any]:
        with closing(await Connection.open(settings.bus)) as connection:
            await require_running(connection)
            (found,) = await connection.call(ROOT, MANAGER, member, patience=_PEEK_SECONDS)
        return list(found)

    return asyncio.run(run())


async def require_running(connection: Connection) -> None:
    """Raise :class:`CallError` unless phosd runs: to call it could start it, although it was
    stopped on purpose.
    """
    (runs,) = await connection.call(
        "/org/freedesktop/DBus", _DBUS, "NameHasOwner", "s", NAME, destination=_DBUS
    )
    if not runs:
        raise CallError(f"{_DBUS}.Error.NameHasNoOwner", "phosd does not run")


def ask(settings: Settings, path: str, interface: str, member: str, **options: Variant) -> Any:
    """Call an object's method that takes only options, and return its value. Raises
    :class:`CallError`.
    """
    words = (path, f"org.phos.{interface}", member, "a{sv}", options)

    async def run() -> Any:
        with closing(await Connection.open(settings.bus)) as connection:
            (found,) = await _ask(connection, *words)
        return found

    return asyncio.run(run())


def cancel(settings: Settings, path: str) -> None:
    """Cancel a job. Raises :class:`CallError`."""

    async def run() -> None:
        with closing(await Connection.open(settings.bus)) as connection:
            await _ask(connection, path, JOB, "Cancel", "a{sv}", {})

    asyncio.run(run())


@contextmanager
def if_missing(code: str, text: str) -> Iterator[None]:
    """Turn an ``UnknownObject`` error inside the block into a :class:`CommandError` with this
    text.
    """
    try:
        yield
    except CallError as error:
        if error.name.endswith(".UnknownObject"):
            raise CommandError(code, text) from error
        raise


def objects(settings: Settings, interface: str, *refresh: str) -> list[Properties]:
    """Return the properties of all objects with this interface, refreshed by the methods
    ``refresh``. Raises :class:`CallError`.
    """
    return managed(settings, *refresh).of(interface)


def managed(settings: Settings, *refresh: str) -> "Managed":
    """Return all objects that the caller may see, refreshed by the methods ``refresh``. Raises
    :class:`CallError`.
    """

    async def run() -> Managed:
        with closing(await Connection.open(settings.bus)) as connection:
            for member in refresh:
                await connection.call(ROOT, MANAGER, member)
            (found,) = await connection.call(ROOT, _OBJECTS, "GetManagedObjects")
        return Managed(found)

    return asyncio.run(run())


class Managed(dict[str, dict[str, Properties]]):
    """Objects by path, each with its interfaces, as the bus lists them."""

    def of(self, interface: str) -> list[Properties]:
        """Return the properties of all objects with this interface."""
        return [self.at(path, interface) for path in self if f"org.phos.{interface}" in self[path]]

    def gpus_of(self, process: Properties) -> list[Properties]:
        """Return the GPUs that a process uses, by number: as its hook says, or the GPU."""
        found = (
            gpu
            for gpu in self.of("Gpu1")
            if gpu["Path"] in process["GPUs"] or process["Pid"] in gpu["Processes"]
        )
        return sorted(found, key=lambda gpu: int(gpu["Ordinal"]))

    def at(self, path: str, interface: str) -> Properties:
        """Return the properties of one object. Raises :class:`CallError` if it is gone."""
        found = self.get(path, {}).get(f"org.phos.{interface}")
        if found is None:
            raise CallError(f"{_DBUS}.Error.UnknownObject", f"there is no object {path}")
        return {"Path": path} | found


def properties(settings: Settings, path: str, interface: str) -> Properties:
    """Return the properties of one object. Raises :class:`CallError`."""

    async def run() -> Properties:
        with closing(await Connection.open(settings.bus)) as connection:
            (values,) = await connection.call(path, _PROPERTIES, "GetAll", "s", interface)
        return dict(values)

    return asyncio.run(run())


def run_job(
    settings: Settings,
    tell: Callable[[Properties], None],
    say: Callable[[str], None],
    member: str,
    signature: str,
    *args: Any,
) -> tuple[Properties, bool]:
    """Start a job and watch it until it ends. Returns its final properties, and whether Ctrl-C was
    pressed.

    ``tell`` gets the properties at every change. Ctrl-C cancels the job, which ``say`` reports; a
    second Ctrl-C exits and leaves the job running. Raises :class:`CallError`, or
    :class:`CommandError` when phosd goes away.
    """
    return asyncio.run(_run_job(settings, tell, say, member, signature, *args))


async def _run_job(
    settings: Settings,
    tell: Callable[[Properties], None],
    say: Callable[[str], None],
    member: str,
    signature: str,
    *args: Any,
) -> tuple[Properties, bool]:
    with closing(await Connection.open(settings.bus)) as connection:
        with _cancelled_by_ctrl_c(connection, say) as ctrl_c:
            (path,) = await _ask(connection, ROOT, MANAGER, member, signature, *args)
            ctrl_c.job.set_result(path)
            news: asyncio.Queue[Signal] = asyncio.Queue()
            # Subscribe after the call: the call itself may start phosd and so change the name's
            # owner.
            await connection.subscribe(
                news.put_nowait,
                f"sender='{NAME}',path_namespace='{ROOT}'",
                f"sender='{_DBUS}',member='NameOwnerChanged',arg0='{NAME}'",
            )
            closed = asyncio.create_task(connection.closed())
            closed.add_done_callback(lambda _: news.put_nowait(_NO_BUS))
            job = await _properties(connection, path)
            tell(job)
            while job["State"] in ("queued", "running"):
                with suppress(TimeoutError):  # a bus that has too much to deliver loses signals
                    async with asyncio.timeout(_NEWS_SECONDS):
                        await _until_news_of(path, news)
                before, job = job, await _properties(connection, path)
                if job != before:
                    tell(job)
        return job, ctrl_c.pressed


async def _ask(connection: Connection, *call: Any) -> list[Any]:
    """Call a method that may need authorisation: at a terminal, polkit may ask for a password."""
    if sys.stdin.isatty():
        return await connection.call(*call, interactive=True, patience=_PASSWORD_SECONDS)
    return await connection.call(*call)


async def _properties(connection: Connection, path: str) -> Properties:
    try:
        (values,) = await connection.call(path, _PROPERTIES, "GetAll", "s", JOB)
    except CallError as error:
        if error.name.endswith(".Disconnected"):
            raise _without_bus(path) from error
        # A new phosd, perhaps started by this very call, does not know the job.
        if error.name.endswith((".NoReply", ".ServiceUnknown", ".UnknownObject")):
            raise _gone(path) from error
        raise
    return dict(values)


async def _until_news_of(path: str, news: "asyncio.Queue[Signal]") -> None:
    while True:
        heard = await news.get()
        if heard is _NO_BUS:
            raise _without_bus(path)
        owner_changed = (heard.sender, heard.member) == (_DBUS, "NameOwnerChanged")
        if owner_changed and heard.args[0] == NAME:
            raise _gone(path)
        # Whoever sent it: phosd is asked then.
        if heard.path == path or heard.member == "JobRemoved":
            return


def _without_bus(path: str) -> CommandError:
    return CommandError(
        "NoDaemon",
        f"the connection to the bus was lost during {path}; the job goes on, and `phos jobs` shows "
        "it when the bus is back",
    )


def _gone(path: str) -> CommandError:
    return CommandError(
        "NoDaemon",
        f"phosd ended while it worked on {path}; `phos history` shows what became of the job",
    )


class _cancelled_by_ctrl_c:  # noqa: N801 - a context manager, used like a function
    """Cancels the job on the first Ctrl-C inside the block, as soon as ``job`` has its path; the
    second Ctrl-C ends this program.
    """

    job: "asyncio.Future[str]"

    def __init__(self, connection: Connection, say: Callable[[str], None]) -> None:
        self._connection = connection
        self._say = say
        self._cancelling: asyncio.Task[None] | None = None

    @property
    def pressed(self) -> bool:
        return self._cancelling is not None

    def __enter__(self) -> "_cancelled_by_ctrl_c":
        self._loop = asyncio.get_running_loop()
        self.job = self._loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._cancelling is not None:
            raise KeyboardInterrupt
        self._say("cancelling; once more to leave the job to itself")
        self._cancelling = self._loop.create_task(self._cancel())

    async def _cancel(self) -> None:
        try:
            await _ask(self._connection, await self.job, JOB, "Cancel", "a{sv}", {})
        except CallError as error:
            self._say(error.text)
