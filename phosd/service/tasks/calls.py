"""Wait until somebody calls a program that is frozen."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack
from enum import Enum, auto
from typing import Any

from phosd.engine.program.doors import Doors, open_doors
from phosd.engine.system.freezer import with_those_below
from phosd.engine.system.procfs import ProcessId

_LOOK_SECONDS = 2.0
"""Seconds between two looks whether it is still worth waiting."""
_READ_SECONDS = 0.5
"""Seconds between two looks whether something was sent on a connection that it had accepted."""
_SHARE = 10
"""These looks take at most one part of so many of the time: there may be many connections."""

Read = Callable[..., Awaitable[Any]]
"""Calls a function in a thread, and returns what that returns."""


class Call(Enum):
    """Whether somebody has called: nobody; before the wait began; or since."""

    NONE = auto()
    BEFORE = auto()
    SINCE = auto()


async def await_call(
    processes: Collection[ProcessId], read: Read, goes_on: Callable[[], Awaitable[bool]]
) -> Call:
    """Wait until somebody calls a program, of which these are the first processes, or one of them
    ends; nobody has called if it does not go on as it is.

    Raises what :func:`open_doors` raises, and :class:`OSError` if it is short of descriptors.
    """
    doors = await _opened(processes, read)
    loop = asyncio.get_running_loop()
    reads, woken, looked = any(doors.accepted.values()), asyncio.Event(), loop.time()
    with contextlib.closing(doors):
        if await read(lambda: doors.is_called):
            return Call.BEFORE if await goes_on() else Call.NONE
        with _watched(processes, doors, woken.set):
            while not woken.is_set():
                began = loop.time()
                if reads and await read(lambda: doors.is_sent_to):
                    break
                pause = max(_READ_SECONDS, _SHARE * (loop.time() - began))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause if reads else _LOOK_SECONDS):
                        await woken.wait()
                if not woken.is_set() and loop.time() - looked >= _LOOK_SECONDS:
                    looked = loop.time()
                    if not await goes_on():
                        return Call.NONE
    return Call.SINCE if await goes_on() else Call.NONE


async def _opened(processes: Collection[ProcessId], read: Read) -> Doors:
    def opened() -> Doors:
        return open_doors([*with_those_below(processes)])

    def over(done: "asyncio.Future[Doors]") -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    opening = asyncio.ensure_future(read(opened))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(over)  # nobody waits for them any more
        raise


@contextlib.contextmanager
def _watched(
    processes: Collection[ProcessId], doors: Doors, call: Callable[[], None]
) -> Iterator[None]:
    """Call ``call`` when somebody is at the doors, or one of the processes ends."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:

        def watch(descriptor: int) -> None:
            def once() -> None:  # it stays readable
                loop.remove_reader(descriptor)
                call()

            loop.add_reader(descriptor, once)
            stack.callback(loop.remove_reader, descriptor)

        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process.pid)
                stack.callback(os.close, pidfd)
                watch(pidfd)
        for each in doors.listening:
            watch(each.fileno())
        yield
