"""D-Bus, for the daemon and its clients. The only module that imports ``dbus_next``.

The library's own service classes are not used: they answer ``GetAll`` without asking who calls,
send Python tracebacks to callers and emit ObjectManager signals from the wrong path. A
:class:`Connection` hands every method call to one handler instead, together with its sender.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dbus_next.aio.message_bus import MessageBus
from dbus_next.constants import BusType, MessageFlag, MessageType, NameFlag, RequestNameReply
from dbus_next.errors import AuthError, DBusError, InvalidAddressError
from dbus_next.message import Message
from dbus_next.signature import Variant as Variant
from dbus_next.validators import is_object_path_valid

from phosd.engine.errors import PhosError

NAME = "org.phos"
ROOT = "/org/phos"
ERROR_PREFIX = "org.phos.Error."
PATIENCE = 120.0
"""Seconds to wait for a reply. Long work is a job, not a long call."""

_DBUS = "org.freedesktop.DBus"
_log = logging.getLogger(__name__)


class NoBusError(Exception):
    """No bus answers at the address, or it does not let us in. ``hint`` says what to do."""

    hint = (
        "start the system's bus, or take one of your own: `dbus-run-session -- bash`, and in it "
        "`phosd --session &` and `export PHOS_BUS=session`"
    )


class CallError(Exception):
    """The other side answered with an error: its D-Bus ``name`` and ``text``."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.text = text


@dataclass(frozen=True)
class Call:
    """One method call that came in. ``args`` hold plain values: variants are unwrapped."""

    sender: str
    path: str
    interface: str | None
    member: str
    signature: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Signal:
    """One signal that came in, with plain values."""

    path: str
    interface: str
    member: str
    args: tuple[Any, ...]


Answer = Callable[[Call], Awaitable[tuple[str, list[Any]]]]
"""Answers a call with the signature and the values of the reply."""


class Connection:
    """A connection to a bus. Every method must be used on the event loop that opened it."""

    def __init__(self, bus: MessageBus) -> None:
        self._bus: Any = bus
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    async def open(where: str) -> "Connection":
        """Connect to ``system``, ``session`` or a D-Bus address.

        Raises :class:`NoBusError`.
        """
        try:
            if where in ("system", "session"):
                bus = MessageBus(bus_type=BusType[where.upper()])
            else:
                bus = MessageBus(bus_address=where)
            await bus.connect()
        except (AuthError, InvalidAddressError, OSError, EOFError, KeyError) as error:
            raise NoBusError(f"no D-Bus at {where}: {error}") from error
        return Connection(bus)

    async def own(self, name: str) -> bool:
        """Take the bus name; false when somebody else has it. Raises :class:`CallError`."""
        try:
            request = self._bus.request_name(name, NameFlag.DO_NOT_QUEUE)
            reply = await asyncio.wait_for(request, PATIENCE)
        except DBusError as error:
            raise CallError(error.type, error.text) from error
        except TimeoutError:
            raise CallError(f"{_DBUS}.Error.NoReply", "the bus does not answer") from None
        return reply in (RequestNameReply.PRIMARY_OWNER, RequestNameReply.ALREADY_OWNER)

    async def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *args: Any,
        destination: str = NAME,
    ) -> list[Any]:
        """Call a method and wait for its reply: plain values. Raises :class:`CallError`."""
        message = Message(
            destination=destination,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=list(args),
        )
        try:
            reply = await asyncio.wait_for(self._bus.call(message), PATIENCE)
        except TimeoutError:
            text = f"{destination} did not answer {member} within {PATIENCE:.0f} s"
            raise CallError(f"{_DBUS}.Error.NoReply", text) from None
        if reply.message_type is MessageType.ERROR:
            raise CallError(reply.error_name, str(reply.body[0]) if reply.body else "")
        return [plain(value) for value in reply.body]

    async def uid_of(self, sender: str) -> int:
        """The user of a connection, as the bus knows it. Raises :class:`CallError`."""
        path = "/org/freedesktop/DBus"
        (uid,) = await self.call(
            path, _DBUS, "GetConnectionUnixUser", "s", sender, destination=_DBUS
        )
        return int(uid)

    def emit(self, path: str, interface: str, member: str, signature: str, *args: Any) -> None:
        """Send a signal to whoever listens."""
        if self._bus.connected:
            body = [clean(value) for value in args]
            self._bus.send(Message.new_signal(path, interface, member, signature, body))

    async def subscribe(self, handler: Callable[[Signal], None], *rules: str) -> None:
        """Have ``handler`` called for the signals that the match rules select.

        What another subscription of this connection selects reaches it as well.
        """

        def on_message(message: Message) -> bool:
            if message.message_type is MessageType.SIGNAL:
                args = tuple(plain(value) for value in message.body)
                handler(Signal(message.path, message.interface, message.member, args))
            return False

        self._bus.add_message_handler(on_message)
        for rule in rules:
            await self.call(
                "/org/freedesktop/DBus", _DBUS, "AddMatch", "s", rule, destination=_DBUS
            )

    def serve(self, answer: Answer) -> None:
        """Answer every method call, ``org.freedesktop.DBus.Peer`` excepted, by ``answer``."""

        def on_message(message: Message) -> bool:
            if message.message_type is not MessageType.METHOD_CALL:
                return False
            if message.interface == "org.freedesktop.DBus.Peer":
                return False
            task = asyncio.get_running_loop().create_task(self._reply(message, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return True

        self._bus.add_message_handler(on_message)

    async def _reply(self, message: Message, answer: Answer) -> None:
        try:
            try:
                args = tuple(plain(value) for value in message.body)
                call = Call(
                    message.sender,
                    message.path,
                    message.interface,
                    message.member,
                    message.signature,
                    args,
                )
                signature, values = await answer(call)
                body = [clean(value) for value in values]
                self._send_reply(message, Message.new_method_return(message, signature, body))
            except CallError as error:
                self._send_error(message, error.name, error.text)
            except PhosError as error:
                self._send_error(message, ERROR_PREFIX + error.code, str(error))
        except Exception:
            # What went wrong inside is for the log; the caller learns no more than that it did.
            _log.exception("answering %s.%s failed", message.interface, message.member)
            text = f"phosd failed while answering {message.member}; its log says why"
            self._send_error(message, ERROR_PREFIX + "Internal", text)

    def _send_error(self, message: Message, name: str, text: str) -> None:
        self._send_reply(message, Message.new_error(message, name, str(clean(text))))

    def _send_reply(self, message: Message, reply: Message) -> None:
        if self._bus.connected and not message.flags & MessageFlag.NO_REPLY_EXPECTED:
            self._bus.send(reply)

    async def closed(self) -> None:
        """Wait until the bus goes away or :meth:`close` is called."""
        with contextlib.suppress(EOFError, OSError):
            await self._bus.wait_for_disconnect()

    def close(self) -> None:
        """Leave the bus."""
        self._bus.disconnect()


def plain(value: Any) -> Any:
    """The value without the variants in it."""
    if isinstance(value, Variant):
        return plain(value.value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def clean(value: Any) -> Any:
    """The value with strings that D-Bus can carry.

    A command line may hold any bytes; a bus throws out who sends a string that is not UTF-8.
    """
    if isinstance(value, str):
        return value.replace("\0", " ").encode("utf-8", "replace").decode()
    if isinstance(value, Variant):
        return Variant(value.signature, clean(value.value))
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def path_of(kind: str, key: str) -> str:
    """The object path of a thing: what a path may not hold is written ``_<hex>``."""
    escaped = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in key)
    return f"{ROOT}/{kind}/{escaped}"


def is_path(text: str) -> bool:
    """Whether the text is a well-formed object path."""
    return bool(is_object_path_valid(text))


def variants(values: Mapping[str, bool | int | float | str]) -> dict[str, Variant]:
    """An ``a{sv}`` of plain values: b, x, d or s by their type."""
    signatures = {bool: "b", int: "x", float: "d", str: "s"}
    return {key: Variant(signatures[type(value)], value) for key, value in values.items()}
