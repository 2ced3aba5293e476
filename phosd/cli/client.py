"""Call phosd over D-Bus, and watch jobs until they end."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

from phosd.bus import ROOT, CallError
from phosd.cli.settings import Settings
from phosd.client.daemon import Daemon, Managed, Properties
from phosd.client.errors import CommandError
from phosd.client.text import NO_GPU
from phosd.client.users import of_yours
from phosd.interface.manager import MANAGER
from phosd.interface.methods import GPU, JOB
from phosd.interface.model import Interface

_PEEK_SECONDS = 2.0
"""Seconds that a completion waits for phosd."""


def call(settings: Settings, member: str, /, *args: Any, **options: Any) -> Any:
    """Call a method of the manager and return the value of its reply. Raises :class:`CallError`."""
    return ask(settings, ROOT, MANAGER, member, *args, **options)


def ask(
    settings: Settings, path: str, stated: Interface, member: str, /, *args: Any, **options: Any
) -> Any:
    """Call a method of an object and return the value of its reply. Raises :class:`CallError`."""

    async def run() -> Any:
        async with _daemon(settings) as daemon:
            return await daemon.ask(path, stated, member, *args, **options)

    return asyncio.run(run())


def peek(settings: Settings, member: str) -> list[Any]:
    """Call a method of Manager1 that lists something, if phosd runs, and return the list. Nothing
    is started, and phosd has two seconds. Raises :class:`CallError` and :class:`NoBusError`.
    """

    async def run() -> list[Any]:
        async with _daemon(settings) as daemon:
            await daemon.owner()
            (found,) = await daemon.connection.call(
                ROOT, MANAGER.name, member, patience=_PEEK_SECONDS
            )
        return list(found)

    return asyncio.run(run())


def cancel(settings: Settings, path: str) -> None:
    """Cancel a job. Raises :class:`CallError`."""
    ask(settings, path, JOB, "Cancel")


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


def objects(settings: Settings, stated: Interface, *refresh: str) -> list[Properties]:
    """Return the properties of all objects with this interface, refreshed by the methods
    ``refresh``. Raises :class:`CallError`.
    """
    return managed(settings, *refresh).of(stated)


def no_process(found: Managed) -> str:
    """Say why no process is listed, and what to do."""
    if not found.of(GPU):
        return NO_GPU
    return f"no process{of_yours()} uses a GPU; start a program with `phos run -- COMMAND`"


def managed(settings: Settings, *refresh: str) -> Managed:
    """Return all objects that the caller may see, refreshed by the methods ``refresh``. Raises
    :class:`CallError`.
    """

    async def run() -> Managed:
        async with _daemon(settings) as daemon:
            return await daemon.managed(*refresh)

    return asyncio.run(run())


def properties(settings: Settings, path: str, stated: Interface) -> Properties:
    """Return the properties of one object. Raises :class:`CallError`."""

    async def run() -> Properties:
        async with _daemon(settings) as daemon:
            return await daemon.properties(path, stated.name)

    return asyncio.run(run())


def run_job(
    settings: Settings,
    tell: Callable[[Properties], None],
    say: Callable[[str], None],
    member: str,
    /,
    *args: Any,
    **options: Any,
) -> tuple[Properties, bool]:
    """Start a job and watch it until it ends. Returns its final properties, and whether Ctrl-C was
    pressed.

    ``tell`` gets the properties at every change. Ctrl-C cancels the job, which ``say`` reports; a
    second Ctrl-C exits and leaves the job running. Raises :class:`CallError`, or
    :class:`CommandError` when phosd goes away.
    """
    return asyncio.run(_run_job(settings, tell, say, member, *args, **options))


async def _run_job(
    settings: Settings,
    tell: Callable[[Properties], None],
    say: Callable[[str], None],
    member: str,
    /,
    *args: Any,
    **options: Any,
) -> tuple[Properties, bool]:
    job: Properties = {}
    async with _daemon(settings) as daemon:
        with _cancelled_by_ctrl_c(daemon, say) as ctrl_c:
            path = await daemon.ask(ROOT, MANAGER, member, *args, **options)
            ctrl_c.job.set_result(path)
            async for job in daemon.follow(path):
                tell(job)
        return job, ctrl_c.pressed


@asynccontextmanager
async def _daemon(settings: Settings) -> AsyncIterator[Daemon]:
    """Connect to the bus until the end of the block; polkit may ask at a terminal."""
    with closing(await Daemon.open(settings.bus, interactive=sys.stdin.isatty())) as daemon:
        yield daemon


class _cancelled_by_ctrl_c:  # noqa: N801 - a context manager, used like a function
    """Cancels the job on the first Ctrl-C inside the block, as soon as ``job`` has its path; the
    second Ctrl-C ends this program.
    """

    job: "asyncio.Future[str]"

    def __init__(self, daemon: Daemon, say: Callable[[str], None]) -> None:
        self._daemon = daemon
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
            await self._daemon.ask(await self.job, JOB, "Cancel")
        except CallError as error:
            self._say(error.text)
