"""The command line's side of the bus: calls, and jobs watched until they end."""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from phosd.bus import NAME, ROOT, CallError, Connection, Signal, Variant
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError

MANAGER = "org.phos.Manager1"
JOB = "org.phos.Job1"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_OBJECTS = "org.freedesktop.DBus.ObjectManager"

_DBUS = "org.freedesktop.DBus"
_NO_BUS = Signal("", "", "", ())
"""Takes the place of a signal when there will be none any more."""
_PASSWORD_SECONDS = 330.0
"""Longer than phosd waits for a password."""

Properties = dict[str, Any]


def call(settings: Settings, member: str, signature: str = "", *args: Any) -> list[Any]:
    """One call of Manager1 and its reply. Raises :class:`CallError`."""

    async def run() -> list[Any]:
        with closing(await Connection.open(settings.bus)) as connection:
            return await _ask(connection, ROOT, MANAGER, member, signature, *args)

    return asyncio.run(run())


def ask(settings: Settings, path: str, interface: str, member: str, **options: Variant) -> Any:
    """What a method of an object gives that takes only options. Raises :class:`CallError`."""
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
    """Inside, that there is no such object becomes a :class:`CommandError` with this text."""
    try:
        yield
    except CallError as error:
        if error.name.endswith(".UnknownObject"):
            raise CommandError(code, text) from error
        raise


def objects(settings: Settings, interface: str, refresh: str) -> list[Properties]:
    """The properties of all objects with this interface, after a call that has them renewed."""

    async def run() -> list[Properties]:
        with closing(await Connection.open(settings.bus)) as connection:
            await connection.call(ROOT, MANAGER, refresh)
            (managed,) = await connection.call(ROOT, _OBJECTS, "GetManagedObjects")
        return [
            {"Path": path} | interfaces[f"org.phos.{interface}"]
            for path, interfaces in managed.items()
            if f"org.phos.{interface}" in interfaces
        ]

    return asyncio.run(run())


def properties(settings: Settings, path: str, interface: str) -> Properties:
    """The properties of one object. Raises :class:`CallError`."""

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
    """Start a job and watch it until it ends: its properties then, and whether Ctrl-C was pressed.

    ``tell`` gets the properties at every change. Ctrl-C cancels the job and ``say`` says so; a
    second Ctrl-C leaves it to itself. Raises :class:`CallError`, or :class:`CommandError` when
    phosd goes away.
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
            # Not before the call, which may be what starts phosd: only who has answered can end.
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
                await _until_news_of(path, news)
                job = await _properties(connection, path)
                tell(job)
        return job, ctrl_c.pressed


async def _ask(connection: Connection, *call: Any) -> list[Any]:
    """A call that may need a right: who sits at a terminal may be asked for a password."""
    if sys.stdin.isatty():
        return await connection.call(*call, interactive=True, patience=_PASSWORD_SECONDS)
    return await connection.call(*call)


async def _properties(connection: Connection, path: str) -> Properties:
    try:
        (values,) = await connection.call(path, _PROPERTIES, "GetAll", "s", JOB)
    except CallError as error:
        if error.name.endswith(".Disconnected"):
            raise _without_bus(path) from error
        # Another phosd, which this very call may have started, knows nothing of the job.
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
        if heard.path == path or (heard.member == "JobRemoved" and heard.args[0] == path):
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
    """Inside, the first Ctrl-C cancels the job, as soon as ``job`` tells its path; the second ends
    this program.
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
