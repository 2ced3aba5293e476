"""Adapt ``dbus_next``, and parse messages defensively. The only module that imports the library.

The library parses every message, caches every signature that it has seen, and drops the whole
connection when it cannot read one message. Messages come from untrusted senders, and no public name
allows to change that, so this module uses these private names of version 0.2.3:

- ``Unmarshaller`` with ``read``, ``read_argument``, ``read_signature``, ``buf``, ``offset``,
  ``endian`` and ``MarshallerStreamEndError``: nothing public reads values;
- ``Message._marshall``: nothing public encodes a message without sending it, and large messages are
  encoded in a thread;
- ``MessageBus._message_reader``: called when the socket is readable;
- ``MessageBus._on_message``: passes a reply to the waiting public ``call``;
- ``MessageBus._writer`` with ``messages``, ``schedule_write`` and ``sock``: sends encoded messages,
  has the number that wait to be sent, and takes a full socket for the end of the bus;
- ``MessageBus._finalize``, ``_disconnected`` and ``_disconnect_future``: what the public
  ``wait_for_disconnect`` waits for;
- ``MessageBus._stream`` and ``_sock``: the public ``disconnect`` closes neither.

tests/unit/bus/test_dbus_next.py fails when another version defines them differently.
"""

import asyncio
import functools
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dbus_next._private.unmarshaller import MarshallerStreamEndError, Unmarshaller
from dbus_next.aio.message_bus import MessageBus
from dbus_next.constants import BusType, MessageFlag, MessageType
from dbus_next.errors import AuthError, InvalidAddressError
from dbus_next.errors import SignatureBodyMismatchError as SignatureBodyMismatchError
from dbus_next.message import Message
from dbus_next.signature import SignatureTree
from dbus_next.signature import Variant as Variant
from dbus_next.validators import is_object_path_valid as is_object_path_valid

MAX_ARGUMENTS = 8192
"""Most bytes of a call's arguments: the longest path, and room for the rest."""

_AT_ONCE = 64
"""Most messages to read before yielding to the event loop: some 6 ms. What comes from others waits
behind them in the socket, and whatever is begun between two readings makes it wait longer."""
_CONNECT_SECONDS = 10.0
_log = logging.getLogger(__name__)

# Most of the library is untyped.
_Untyped: Any = Unmarshaller
_UntypedBus: Any = MessageBus


class NoBusError(Exception):
    """No bus answers at the address, or it refuses the connection. ``hint`` says what to do."""

    hint = (
        "start the system's bus, or take one of your own: `dbus-run-session -- bash`, and in it "
        "`phosd --session 2>phosd.log &` and `export PHOS_BUS=session`"
    )


@dataclass(frozen=True)
class Call:
    """A received method call. ``interactive``: polkit may ask the caller's user for a password."""

    sender: str
    path: str
    interface: str | None
    member: str
    signature: str
    interactive: bool = False
    serial: int = 0
    wants_reply: bool = True
    body: bytes = b""
    endian: int = ord("l")
    too_large: bool = False

    @functools.cached_property
    def args(self) -> tuple[Any, ...]:
        """The arguments as plain values, with variants unwrapped. Read them only after checking the
        signature.
        """
        return tuple(plain(value) for value in _decode(self.endian, self.signature, self.body))


@dataclass(frozen=True)
class Signal:
    """A received signal. Anybody may send some: look at the sender before reading the values."""

    path: str
    interface: str
    member: str
    sender: str = ""
    signature: str = ""
    body: bytes = b""
    endian: int = ord("l")

    @functools.cached_property
    def args(self) -> tuple[Any, ...]:
        """The values, with variants unwrapped."""
        return tuple(plain(value) for value in _decode(self.endian, self.signature, self.body))


class _Reader(_Untyped):  # type: ignore[misc]
    """A parser of one message. What calls and signals carry stays encoded until it is read."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.found: Call | Signal | Message | None = None

    def complete(self) -> bool:
        """Whether a message has arrived in full; ``found`` is None when it is unusable."""
        try:
            self._read_message()
        except MarshallerStreamEndError:
            return False
        return True

    def read_variant(self, _: Any = None) -> Variant:
        """Read a variant without the library's cache of signatures, which never forgets one."""
        signature = self.read_signature()
        tree = _SIMPLE.get(signature) or SignatureTree(signature)
        return Variant(tree, self.read_argument(tree.types[0]))

    def _read_message(self) -> None:
        self.offset = 0
        self.read(16)
        kind, flags = self.buf[1], self.buf[2]
        order = "<III" if self.buf[0] == ord("l") else ">III"
        body_length, serial, fields_length = struct.unpack_from(order, self.buf, 4)
        body_at = 16 + fields_length + -fields_length % 8
        self.read(body_at + body_length - 16)
        try:
            if kind in (MessageType.METHOD_RETURN.value, MessageType.ERROR.value):
                self.found = self._reply(MessageType(kind), bytes(self.buf[body_at:]))
            elif kind == MessageType.METHOD_CALL.value and fields_length <= 2 * MAX_ARGUMENTS:
                self.found = self._call(flags, serial, bytes(self.buf[body_at:]))
            elif (
                kind == MessageType.SIGNAL.value
                and fields_length <= 2 * MAX_ARGUMENTS
                and len(self.buf) <= 8 * MAX_ARGUMENTS
            ):
                self.found = self._signal(bytes(self.buf[body_at:]))
        except Exception:  # one unreadable message is no reason to drop the connection
            _log.exception("a message on the bus could not be read")

    def _fields(self) -> dict[int, Any]:
        """Return the header fields by their number in the specification."""
        self.endian, self.offset = self.buf[0], 12
        return {code: variant.value for code, variant in self.read_argument(_FIELDS)}

    def _call(self, flags: int, serial: int, body: bytes) -> Call:
        fields = self._fields()
        return Call(
            sender=fields[7],
            path=fields[1],
            interface=fields.get(2),
            member=fields[3],
            signature=fields.get(8, ""),
            interactive=bool(flags & MessageFlag.ALLOW_INTERACTIVE_AUTHORIZATION),
            serial=serial,
            wants_reply=not flags & MessageFlag.NO_REPLY_EXPECTED,
            body=body[:MAX_ARGUMENTS],
            endian=self.buf[0],
            too_large=len(body) > MAX_ARGUMENTS,
        )

    def _reply(self, kind: MessageType, body: bytes) -> Message:
        fields = self._fields()
        signature = fields.get(8, "")
        message: Any = Message
        reply: Message = message(
            message_type=kind,
            reply_serial=fields[5],
            error_name=fields.get(4),
            sender=fields.get(7),
            signature=SignatureTree(signature),
            body=_decode(self.buf[0], signature, body) if body else [],
        )
        return reply

    def _signal(self, body: bytes) -> Signal:
        fields = self._fields()
        return Signal(
            path=fields[1],
            interface=fields[2],
            member=fields[3],
            sender=fields.get(7, ""),
            signature=fields.get(8, ""),
            body=body,
            endian=self.buf[0],
        )


_FIELDS = SignatureTree("a(yv)").types[0]
_SIMPLE = {kind: SignatureTree(kind) for kind in "ybnqiuxtdsogv"}


def _decode(endian: int, signature: str, body: bytes) -> list[Any]:
    reader = _Reader(None)
    reader.endian, reader.buf = endian, bytearray(body)
    return [reader.read_argument(kind) for kind in SignatureTree(signature).types]


class _PatientSocket:
    """A socket that takes nothing while it is full, instead of raising an error.

    One reader that is slow fills the bus, and the bus the socket, for everybody.
    """

    def __init__(self, behind: socket.socket) -> None:
        self._behind = behind

    def send(self, data: memoryview) -> int:
        """Return how many bytes were taken; none as long as the socket is full."""
        try:
            return self._behind.send(data)
        except BlockingIOError:
            return 0


class Bus(_UntypedBus):  # type: ignore[misc]
    """The library's connection, limited so that a flood of messages cannot hold up the event
    loop.
    """

    def __init__(self, take: Callable[[Call | Signal], None], **where: Any) -> None:
        super().__init__(**where)
        self._take = take
        self._more: asyncio.Handle | None = None
        self._reader = _Reader(self._stream)
        self._writer.sock = _PatientSocket(self._sock)
        self._disconnect_future.add_done_callback(_forget)

    @staticmethod
    async def open(where: str, take: Callable[[Call | Signal], None]) -> "Bus":
        """Connect to ``system``, ``session`` or a D-Bus address. Raises :class:`NoBusError`."""
        try:
            if where in ("system", "session"):
                bus = Bus(take, bus_type=BusType[where.upper()])
            else:
                bus = Bus(take, bus_address=where)
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await bus.connect()
            except BaseException:
                bus.leave()
                raise
        except (AuthError, InvalidAddressError, OSError, EOFError, KeyError, TimeoutError) as error:
            raise NoBusError(f"no D-Bus at {where}: {error}") from error
        return bus

    def _message_reader(self) -> None:
        if self._more is None:
            self._read_some()

    def _read_some(self) -> None:
        self._more = None
        if self._disconnected:
            return
        try:
            for _ in range(_AT_ONCE):
                if not self._reader.complete():
                    return
                found, self._reader = self._reader.found, _Reader(self._stream)
                if isinstance(found, Message):
                    self._on_message(found)
                elif found is not None:
                    self._take(found)
        except (EOFError, OSError) as error:
            self._finalize(error)
            return
        self._more = asyncio.get_running_loop().call_soon(self._read_some)

    @property
    def outgoing(self) -> int:
        """Number of messages that wait to be sent."""
        return int(self._writer.messages.qsize())

    async def ask(self, message: Message) -> Message | None:
        """Send a call and return its reply; None when this side has disconnected. Raises
        :class:`EOFError` or :class:`OSError` when the bus has gone.
        """
        if not self.connected:
            raise EOFError
        reply: Message | None = await self.call(message)
        return reply

    def put_bytes(self, data: bytes) -> "asyncio.Future[None]":
        """Send an encoded message; the future is done when the bus has taken it."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent.add_done_callback(_forget)
        self._writer.messages.put_nowait((data, [], sent))
        self._writer.schedule_write()
        return sent

    def leave(self) -> None:
        """Close the connection and its socket."""
        self._finalize(None)
        self._stream.close()
        self._sock.close()


def _forget(done: "asyncio.Future[None]") -> None:
    """Mark an exception as retrieved: :meth:`Connection.closed` reports the end of the bus, so
    asyncio need not.
    """
    if not done.cancelled():
        done.exception()


def encode(message: Message) -> bytes:
    """Encode a message that has its serial."""
    return bytes(cast(Any, message)._marshall())


def method_call(
    destination: str,
    path: str,
    interface: str,
    member: str,
    signature: str,
    args: Sequence[Any],
    interactive: bool,
) -> Message:
    flag = MessageFlag.ALLOW_INTERACTIVE_AUTHORIZATION if interactive else MessageFlag.NONE
    return Message(
        destination=destination,
        path=path,
        interface=interface,
        member=member,
        signature=signature,
        body=list(args),
        flags=flag,
    )


def reply_to(call: Call, signature: str, body: list[Any], error: str = "") -> Message:
    """Return the reply to a call: values, or with ``error`` an error of that name."""
    message: Any = Message
    reply: Message = message(
        message_type=MessageType.ERROR if error else MessageType.METHOD_RETURN,
        reply_serial=call.serial,
        destination=call.sender,
        error_name=error or None,
        signature=signature,
        body=body,
    )
    return reply


def signal_from(path: str, interface: str, member: str, signature: str, body: list[Any]) -> Message:
    return Message.new_signal(path, interface, member, signature, body)


def error_of(reply: Message) -> tuple[str, str] | None:
    """Return name and text of an error reply, or None for another reply."""
    if reply.message_type is not MessageType.ERROR:
        return None
    return reply.error_name, str(reply.body[0]) if reply.body else ""


def complete_types(signature: str) -> list[str]:
    """Split a signature into the signatures of its complete types."""
    return [kind.signature for kind in SignatureTree(signature).types]


def plain(value: Any) -> Any:
    """Return the value with all variants unwrapped."""
    if isinstance(value, Variant):
        return plain(value.value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value
