"""Connect to phosd over D-Bus in a thread of its own.

Reading thousands of objects takes the library seconds, which must not block a screen. The thread
mirrors the properties of all objects and delivers records, at most ten batches a second.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

from phosd.bus import NAME, ROOT, CallError, Connection, NoBusError, Signal
from phosd.client.daemon import (
    DBUS,
    ENDS,
    NOBODY,
    OBJECTS,
    PROPERTIES,
    RULES,
    Daemon,
    Properties,
)
from phosd.client.errors import CommandError, in_words, of_bus
from phosd.client.over_ssh import Tunnel
from phosd.client.records import Record, record_of
from phosd.client.users import user_name
from phosd.interface.manager import MANAGER
from phosd.tui.node import Contact, Update

_BATCH_SECONDS = 0.1
_SILENCE_SECONDS = 30.0
"""Seconds without a signal, of which phosd sends some all the time, after which all is read."""
_RETRY_SECONDS = 2.0
_RETRY_FAR_SECONDS = 15.0
"""The same for another node, where each attempt is somebody who logs in."""
_MOST_AT_ONCE = 4
"""Most objects to read at the same time: phosd limits a client's concurrent calls."""
_MOST_SINGLY = 32
"""Above this number, changed objects are read in one call."""


class BusLink:
    """A :class:`~phosd.tui.node.Link` over D-Bus. Use it on one event loop only."""

    def __init__(self, where: str, tunnel: Tunnel | None = None) -> None:
        """Take ``system``, ``session`` or an address; or the way to another node, and how the bus
        is called there.
        """
        self._where = where
        self._tunnel = tunnel
        self._address = where if tunnel is None else tunnel.address
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: _Session | None = None
        self._main: asyncio.Task[None] | None = None

    def start(self, deliver: Callable[[Update], None]) -> None:
        """Deliver the state of the node and its changes on this event loop, until :meth:`stop`."""
        screens = asyncio.get_running_loop()

        def hand_over(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the screens have ended
                screens.call_soon_threadsafe(deliver, update)

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, hand_over), name="phos-bus", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()

    async def call(
        self, path: str, interface: str, member: str, signature: str = "", *args: Any
    ) -> list[Any]:
        """Call a method and return the values of its reply. Raises :class:`CommandError`.

        Polkit may ask the user for a password if the desktop has an agent.
        """
        if self._loop is None:
            raise CommandError("NoDaemon", "there is no way to phosd yet; wait until there is")
        asked = self._call(path, interface, member, signature, args)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))

    async def _call(
        self, path: str, interface: str, member: str, signature: str, args: tuple[Any, ...]
    ) -> list[Any]:
        session = self._session
        if session is None:
            raise CommandError(
                "NoDaemon", f"{member} was not asked for: there is no bus; try again when there is"
            )
        try:
            return await session.daemon.call(path, interface, member, signature, *args)
        except CallError as error:
            raise of_bus(error, self._where) from error

    def _run(self, loop: asyncio.AbstractEventLoop, hand_over: Callable[[Update], None]) -> None:
        asyncio.set_event_loop(loop)
        self._main = loop.create_task(self._keep(hand_over))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(self._main)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _keep(self, hand_over: Callable[[Update], None]) -> None:
        """Connect to the bus, again and again."""
        while True:
            try:
                with closing(await Connection.open(self._address)) as connection:
                    self._session = _Session(connection, self._where, hand_over)
                    await self._session.run()
                why = "the bus went away"
            except NoBusError as error:
                why = await self._why_no_bus(error)
            except CallError as error:
                why = str(of_bus(error, self._where))
            finally:
                self._session = None
            hand_over(Update(contact=Contact.GONE, trouble=why))
            await asyncio.sleep(_RETRY_FAR_SECONDS if self._tunnel else _RETRY_SECONDS)

    async def _why_no_bus(self, error: NoBusError) -> str:
        if self._tunnel is None:
            return f"{error}; {error.hint}"
        return str(in_words(await asyncio.to_thread(self._tunnel.why_not), self._where))


class _Session:
    """One connection to the bus, until it is lost."""

    def __init__(
        self, connection: Connection, where: str, hand_over: Callable[[Update], None]
    ) -> None:
        self.connection = connection
        self._where = where
        self.daemon = Daemon(connection, interactive=True)
        self._hand_over = hand_over
        self._news: asyncio.Queue[Signal | None] = asyncio.Queue()
        self._owner = ""
        self._objects: dict[str, tuple[str, Properties]] = {}
        self._changed: set[str] = set()
        self._gone: set[str] = set()
        self._noted = False
        self._unread: set[str] = set()
        self._hidden: set[str] = set()
        """Objects not to deliver before they are read: a new object's signal lacks private
        properties, and the object may belong to another user.
        """
        self._wants_reading = asyncio.Event()
        self._told: dict[str, set[str]] = {}
        """Properties that signals changed during the read of an object; they are newer than its
        result.
        """
        self._read_all = False

    async def run(self) -> None:
        """Mirror the objects until the bus goes away. Raises :class:`CallError`."""
        await self.connection.subscribe(self._news.put_nowait, *RULES)
        work = (self.connection.closed(), self._mirror(), self._read())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _mirror(self) -> None:
        """Read all objects whenever phosd starts, and follow its signals."""
        await self._meet()
        while True:
            try:
                async with asyncio.timeout(_SILENCE_SECONDS):
                    self._take(await self._news.get())
            except TimeoutError:
                self._read_all = True  # a bus that has too much to deliver loses signals
            await asyncio.sleep(_BATCH_SECONDS)
            while not self._news.empty():
                self._take(self._news.get_nowait())
            if self._read_all:
                await self._meet()
            else:
                self._deliver()

    async def _meet(self) -> None:
        """Read all objects of phosd, and report the contact."""
        self._read_all = False
        if not self._owner:
            self._hand_over(Update(contact=Contact.SEEKING))
        while True:
            try:
                # On a system bus this may activate phosd.
                manager = await self.daemon.properties(ROOT, MANAGER.name)
                managed = await self.daemon.managed()
                self._owner = await self.daemon.owner()
                break
            except CallError as error:
                why = str(of_bus(error, self._where))
                self._hand_over(Update(contact=Contact.GONE, trouble=why))
                if error.name.endswith(NOBODY):
                    return  # NameOwnerChanged reports its start
                if error.name.endswith(".Disconnected"):
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
        self._objects = {ROOT: (MANAGER.name, manager)}
        for path, interfaces in managed.items():
            for interface, values in interfaces.items():
                self._objects[path] = (interface, values)
        for pending in (self._changed, self._gone, self._unread, self._hidden):
            pending.clear()
        records = {path: r for path in self._objects if (r := self._record(path)) is not None}
        self._hand_over(Update(records, whole=True, contact=Contact.HERE))

    def _take(self, signal: Signal | None) -> None:
        if signal is None:
            return
        name = (signal.interface, signal.member)
        if (signal.sender, signal.member) == (DBUS, "NameOwnerChanged"):
            self._owner_changed(*signal.args)
        elif signal.sender != self._owner:
            return  # anybody may send signals that look like phosd's
        elif name == (PROPERTIES, "PropertiesChanged"):
            _, changed, invalidated = signal.args
            if signal.path in self._objects:
                self._objects[signal.path][1].update(changed)
                self._told.get(signal.path, set()).update(changed)
                self._changed.add(signal.path)
                if changed.get("State") in ENDS:
                    self._hidden.add(signal.path)  # deliver the end together with the result
                    self._want(signal.path)
                elif invalidated:
                    self._want(signal.path)
        elif name == (OBJECTS, "InterfacesAdded"):
            path, interfaces = signal.args
            for interface, values in interfaces.items():
                self._objects[path] = (interface, dict(values))
            self._hidden.add(path)
            self._want(path)
        elif name == (OBJECTS, "InterfacesRemoved"):
            self._forget(signal.args[0])
        elif name == (MANAGER.name, "EventNew"):
            self._noted = True

    def _owner_changed(self, name: str, _: str, now: str) -> None:
        if name != NAME or now == self._owner:
            return
        self._owner = ""
        if now:
            self._read_all = True
        else:
            self._read_all = False
            why = str(of_bus(CallError(f"{DBUS}.Error.ServiceUnknown", ""), self._where))
            self._hand_over(Update(contact=Contact.GONE, trouble=why))

    def _want(self, path: str) -> None:
        """Read the object again, since signals lack private properties."""
        self._unread.add(path)
        self._wants_reading.set()

    def _forget(self, path: str) -> None:
        self._objects.pop(path, None)
        for pending in (self._changed, self._unread, self._hidden):
            pending.discard(path)
        self._gone.add(path)

    async def _read(self) -> None:
        """Read the objects whose signals were incomplete, concurrently with the signals."""
        while True:
            await self._wants_reading.wait()
            await asyncio.sleep(_BATCH_SECONDS)
            self._wants_reading.clear()
            wanted, self._unread = self._unread, set()
            if len(wanted) > _MOST_SINGLY:
                self._read_all = True
            else:
                turns = asyncio.Semaphore(_MOST_AT_ONCE)
                await asyncio.gather(*(self._read_one(path, turns) for path in wanted))
            self._news.put_nowait(None)

    async def _read_one(self, path: str, turns: asyncio.Semaphore) -> None:
        if path not in self._objects:
            return
        interface, _ = self._objects[path]
        told = self._told[path] = set()
        try:
            async with turns:
                found = await self.daemon.properties(path, interface)
        except CallError as error:
            if error.name.endswith((".NotAuthorized", ".UnknownObject")):
                self._forget(path)  # another user's, or already gone
            elif self._owner:
                await asyncio.sleep(_RETRY_SECONDS)
                self._want(path)
            return
        finally:
            del self._told[path]
        if path in self._objects:
            newer = {name: self._objects[path][1][name] for name in told}
            self._objects[path] = (interface, found | newer)
            self._hidden.discard(path)
            self._changed.add(path)

    def _deliver(self) -> None:
        told = self._changed - self._hidden
        records = {path: r for path in told if (r := self._record(path)) is not None}
        if records or self._gone or self._noted:
            self._hand_over(Update(records, frozenset(self._gone), noted=self._noted))
        self._changed, self._gone, self._noted = set(), set(), False

    def _record(self, path: str) -> Record | None:
        if path not in self._objects:
            return None
        interface, values = self._objects[path]
        return record_of(path, interface, values, user_name)
