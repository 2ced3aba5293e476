"""Connect to a bus: call, serve, and reconnect when the bus goes away.

The library's own service classes are not used: they answer ``GetAll`` without regard to the caller,
send Python tracebacks to callers and emit ObjectManager signals from the wrong path. A
:class:`Connection` hands every method call to one :class:`Server` instead, together with its
sender.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from phosd.bus.dbus import (
    Bus,
    Call,
    NoBusError,
    Signal,
    SignatureBodyMismatchError,
    encode,
    error_of,
    method_call,
    plain,
    reply_to,
    signal_from,
)
from phosd.bus.values import clean
from phosd.errors import PhosError, from_one_text, in_one_text

NAME = "org.phos"
ERROR_PREFIX = "org.phos.Error."
TIMEOUT = 120.0
"""Seconds to wait for a reply. Long work is a job, not a long call."""
_DBUS = "org.freedesktop.DBus"
_DBUS_PATH = "/org/freedesktop/DBus"
_GONE_RULE = f"type='signal',sender='{_DBUS}',member='NameOwnerChanged',arg2=''"
_DO_NOT_QUEUE, _PRIMARY_OWNER, _ALREADY_OWNER = 4, 1, 4  # of RequestName
_DISCONNECTED = f"{_DBUS}.Error.Disconnected"
_NO_OWNER = f"{_DBUS}.Error.NameHasNoOwner"
_STATS = f"{_DBUS}.Debug.Stats"
_MOST_OUTGOING = 4096
"""Most messages that may wait to be sent; beyond that, refused calls get no answer."""
_SLOWEST_RETRY = 5.0
MAX_ANSWER = 8 << 20
"""Most bytes of a reply. dbus-daemon disconnects who sends more than 32 MiB at once."""
_MOST_UNDELIVERED = 32 << 20
"""Bytes that the bus keeps, not delivered yet, from which on signals are dropped. At 127 MiB it
takes nothing any more, no answers either.
"""
_LOOK_BYTES = 1 << 20
"""Bytes of signals between two looks at what is undelivered."""
_LOOK_SECONDS = 1.0
_LARGE = 32
"""Entries from which on a reply is encoded in a thread, so that the event loop is not held up."""
_log = logging.getLogger(__name__)


class CallError(Exception):
    """An error reply: its D-Bus ``name`` and ``text``, and the ``reason`` of phosd's
    ``Unsupported``, a code; empty if there is none.
    """

    def __init__(self, name: str, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.name = name
        self.text = text
        self.reason = reason

    @classmethod
    def of_reply(cls, name: str, text: str) -> "CallError":
        """Return the error of a reply, with the reason that is behind the text."""
        return cls(name, *from_one_text(name.removeprefix(ERROR_PREFIX), text))


Answer = Callable[[Call], Awaitable[tuple[str, list[Any]]]]
"""Return the signature and the values of the reply to a call."""
Admit = Callable[[int], Awaitable[None]]
"""Wait until a reply of so many bytes may be sent."""


async def _at_once(size: int) -> None:
    """Send it now."""


class Server(Protocol):
    """The receiver of method calls. Its methods are called on the event loop."""

    def take(self, call: Call) -> None:
        """Accept a call and answer it."""

    def gone(self, client: str) -> None:
        """Handle a client that has left the bus."""

    def lost(self) -> None:
        """Handle the loss of the bus, and of all clients with it."""


class Connection:
    """A connection to a bus. Use it only on the event loop that opened it."""

    def __init__(self, where: str, patience: float) -> None:
        self._where = where
        self._patience = patience
        self._bus: Any = None
        self._names: list[str] = []
        self._rules: list[str] = []
        self._listeners: list[Callable[[Signal], None]] = []
        self._server: Server | None = None
        self._closing = False
        self._emitted = 0
        self._crowded = False
        self._look: asyncio.Task[None] | None = None
        # One thread: several that encode would take turns with the event loop, all before it.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    @staticmethod
    async def open(where: str, patience: float = 0.0) -> "Connection":
        """Connect to ``system``, ``session`` or a D-Bus address.

        When the bus goes away, :meth:`closed` tries to reconnect for ``patience`` seconds. Raises
        :class:`NoBusError`.
        """
        connection = Connection(where, patience)
        connection._bus = await Bus.open(where, connection._take)
        return connection

    async def own(self, name: str) -> bool:
        """Request a bus name; return false when another connection has it. Raises
        :class:`CallError`.
        """
        if self._server is not None and _GONE_RULE not in self._rules:
            await self._select(_GONE_RULE)
        owned = await self._request(name)
        if owned and name not in self._names:
            self._names.append(name)
        return owned

    async def _request(self, name: str) -> bool:
        (reply,) = await self._ask_bus("RequestName", "su", name, _DO_NOT_QUEUE)
        return reply in (_PRIMARY_OWNER, _ALREADY_OWNER)

    async def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *args: Any,
        destination: str = NAME,
        patience: float = TIMEOUT,
        interactive: bool = False,
    ) -> list[Any]:
        """Call a method and return the plain values of its reply. Raises :class:`CallError`.

        With ``interactive``, polkit may ask the user for a password.
        """
        message = method_call(destination, path, interface, member, signature, args, interactive)
        try:
            async with asyncio.timeout(patience):
                reply = await self._bus.ask(message)
        except SignatureBodyMismatchError as error:
            text = f"{member} takes other arguments ({signature}): {error}"
            raise CallError(f"{ERROR_PREFIX}InvalidOption", text) from error
        except TimeoutError:
            text = f"{destination} did not answer {member} within {patience:.0f} s"
            raise CallError(f"{_DBUS}.Error.NoReply", text) from None
        except (EOFError, OSError) as error:
            raise CallError(_DISCONNECTED, f"{member} has no answer: the bus is gone") from error
        if reply is None:
            raise CallError(_DISCONNECTED, f"{member} has no answer: the bus was left")
        failure = error_of(reply)
        if failure is not None:
            raise CallError.of_reply(*failure)
        return [plain(value) for value in reply.body]

    async def unread_by(self, name: str) -> int | None:
        """Return the bytes that the bus keeps for a connection until it reads them; None when the
        bus does not tell: dbus-broker, or dbus-daemon without its statistics.
        """
        return await self._statistic(name, "OutgoingBytes")

    async def _statistic(self, name: str, which: str) -> int | None:
        try:
            (found,) = await self.call(
                _DBUS_PATH, _STATS, "GetConnectionStats", "s", name, destination=_DBUS
            )
        except CallError as error:
            return 0 if error.name == _NO_OWNER else None
        value = found.get(which)
        return value if isinstance(value, int) else None

    async def uid_of(self, sender: str) -> int:
        """Return the user id of a connection, as the bus knows it. Raises :class:`CallError`."""
        (uid,) = await self._ask_bus("GetConnectionUnixUser", "s", sender)
        return int(uid)

    async def pid_of(self, sender: str) -> int:
        """Return the pid of a connection, as the bus knows it. Raises :class:`CallError`."""
        (pid,) = await self._ask_bus("GetConnectionUnixProcessID", "s", sender)
        return int(pid)

    async def machine_id(self) -> str:
        """Return the id of the machine that the bus runs on. Raises :class:`CallError`."""
        peer = f"{_DBUS}.Peer"
        (found,) = await self.call(_DBUS_PATH, peer, "GetMachineId", destination=_DBUS)
        return str(found)

    async def _ask_bus(self, member: str, signature: str, *args: Any) -> list[Any]:
        return await self.call(_DBUS_PATH, _DBUS, member, signature, *args, destination=_DBUS)

    def emit(self, path: str, interface: str, member: str, signature: str, *args: Any) -> None:
        """Emit a signal. It is dropped while the bus is away, or has too much to deliver."""
        if not self._bus.connected or self._crowded:
            return
        message = signal_from(path, interface, member, signature, [clean(value) for value in args])
        message.serial = self._bus.next_serial()
        data = encode(message)
        self._bus.put_bytes(data)
        self._emitted += len(data)
        if self._emitted >= _LOOK_BYTES and self._look is None:
            self._emitted = 0
            self._look = asyncio.get_running_loop().create_task(self._look_at_undelivered())

    async def _look_at_undelivered(self) -> None:
        """Drop signals while somebody who should get them reads none, and the bus keeps them."""
        try:
            while (kept := await self._undelivered()) > _MOST_UNDELIVERED:
                if not self._crowded:
                    _log.warning("the bus has %d bytes to deliver: signals are dropped", kept)
                self._crowded = True
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._crowded = False
            self._look = None

    async def _undelivered(self) -> int:
        """Return the bytes sent here that the bus keeps; 0 when it does not tell."""
        return await self._statistic(self._bus.unique_name, "IncomingBytes") or 0

    async def subscribe(self, handler: Callable[[Signal], None], *rules: str) -> None:
        """Call ``handler`` for the signals that the match rules select.

        It also gets signals selected by other subscriptions of this connection, and signals sent to
        this connection directly: check ``Signal.sender``, which the bus vouches for.
        """
        self._listeners.append(handler)
        for rule in rules:
            await self._select(rule)

    async def _select(self, rule: str) -> None:
        await self._ask_bus("AddMatch", "s", rule)
        self._rules.append(rule)

    def serve(self, server: Server) -> None:
        """Hand every method call to ``server``. Call it before owning a name."""
        self._server = server

    def _take(self, found: Call | Signal) -> None:
        if isinstance(found, Call):
            if self._server is not None:
                self._server.take(found)
            else:
                self.refuse(found, f"{_DBUS}.Error.UnknownMethod", "nothing is served here")
            return
        if (found.sender, found.member) == (_DBUS, "NameOwnerChanged") and self._server is not None:
            name, _, now = found.args
            if name.startswith(":") and not now:
                self._server.gone(name)
        for listener in self._listeners:
            try:
                listener(found)
            except Exception:  # values that cannot be read, for one
                _log.exception("handling a signal of %s failed", found.sender)

    async def reply(self, call: Call, answer: Answer, admit: Admit = _at_once) -> None:
        """Answer a call with the values or the error of ``answer``, when ``admit`` returns."""
        bus = self._bus
        try:
            try:
                data = await self._encoded(call, answer)
            except CallError as error:
                data = self._error(call, error.name, error.text)
            except PhosError as error:
                data = self._error(call, ERROR_PREFIX + error.code, in_one_text(error))
            except Exception:
                # Internal errors go to the log; the caller gets no details.
                _log.exception("answering %s.%s failed", call.interface, call.member)
                text = f"phosd failed while answering {call.member}; its log says why"
                data = self._error(call, ERROR_PREFIX + "Internal", text)
            if call.wants_reply and bus.connected:
                await admit(len(data))
                await bus.put_bytes(data)
        except (EOFError, OSError) as error:
            _log.info("the answer to %s was not sent: %s", call.member, error or "the bus is gone")

    async def _encoded(self, call: Call, answer: Answer) -> bytes:
        signature, values = await answer(call)
        serial = self._bus.next_serial()

        def encoded() -> bytes:
            message = reply_to(call, signature, [clean(value) for value in values])
            message.serial = serial
            return encode(message)

        large = any(isinstance(value, list | dict) and len(value) >= _LARGE for value in values)
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._encoder, encoded) if large else encoded()
        if len(data) > MAX_ANSWER:
            raise CallError(
                f"{_DBUS}.Error.LimitsExceeded",
                f"the answer to {call.member} takes {len(data)} bytes, more than {MAX_ANSWER}; "
                "ask for less",
            )
        return data

    def refuse(self, call: Call, name: str, text: str) -> int:
        """Answer a call with an error; drop the answer when too many messages wait to be sent.
        Returns its bytes.
        """
        bus = self._bus
        if not (call.wants_reply and bus.connected) or bus.outgoing >= _MOST_OUTGOING:
            return 0
        data = self._error(call, name, text)
        bus.put_bytes(data)
        return len(data)

    def _error(self, call: Call, name: str, text: str) -> bytes:
        message = reply_to(call, "s", [clean(text)], error=name)
        message.serial = self._bus.next_serial()
        return encode(message)

    async def closed(self) -> None:
        """Wait until the bus has gone for good, or :meth:`close` is called."""
        while True:
            with contextlib.suppress(EOFError, OSError):
                await self._bus.wait_for_disconnect()
            self._bus.leave()
            if self._server is not None:
                self._server.lost()
            if self._closing or not await self._return():
                return

    async def _return(self) -> bool:
        """Reconnect, and restore names and subscriptions. Returns whether that succeeded."""
        loop = asyncio.get_running_loop()
        until, delay = loop.time() + self._patience, 0.1
        if self._patience:
            _log.warning("the bus is gone; trying to be back for %.0f s", self._patience)
        while loop.time() < until and not self._closing:
            try:
                self._bus = await Bus.open(self._where, self._take)
                for rule in self._rules:
                    await self._ask_bus("AddMatch", "s", rule)
                if all([await self._request(name) for name in self._names]):
                    _log.warning("back on the bus")
                    return True
                self._bus.leave()
            except (NoBusError, CallError) as error:
                _log.info("not back on the bus yet: %s", error)
                self._bus.leave()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _SLOWEST_RETRY)
        return False

    def close(self) -> None:
        """Leave the bus."""
        self._closing = True
        self._encoder.shutdown(wait=False)
        if self._bus.connected:
            self._bus.disconnect()
