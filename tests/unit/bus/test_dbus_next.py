"""What phosd uses of the D-Bus library's private names is there, and does what phosd takes it for.

A bus of this test's own is at the other end, so that each byte is known.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dbus_next.message import Message
from dbus_next.signature import SignatureTree

from phosd.bus.dbus import (
    Bus,
    Call,
    NoBusError,
    Signal,
    Variant,
    complete_types,
    encode,
    method_call,
    reply_to,
    signal_from,
)

NAME = ":1.7"
PATIENCE = 30.0


@dataclass
class OtherEnd:
    """Plays the bus for one client, and keeps what the client has taken."""

    bus: Bus
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    taken: list[Call | Signal] = field(default_factory=list)

    def send(self, message: Message, serial: int = 9) -> None:
        message.serial = serial
        self.writer.write(from_stranger(encode(message)))

    async def taken_one(self) -> Call | Signal:
        async with asyncio.timeout(PATIENCE):
            while not self.taken:
                await asyncio.sleep(0.001)
        return self.taken.pop(0)


def from_stranger(message: bytes) -> bytes:
    """The message with its sender, which the bus puts in and the library never does."""
    (length,) = struct.unpack_from("<I", message, 12)
    fields, body = message[16 : 16 + length], message[16 + length + -length % 8 :]
    fields += bytes(-length % 8) + b"\x07\x01s\0" + struct.pack("<I", 4) + b":1.2\0"
    head = message[:12] + struct.pack("<I", len(fields))
    return head + fields + bytes(-len(fields) % 8) + body


async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let a client in, and answer its ``Hello``."""
    await reader.readuntil(b"AUTH EXTERNAL")
    await reader.readline()
    writer.write(b"OK 0123456789abcdef0123456789abcdef\r\n")
    assert await reader.readuntil(b"BEGIN\r\n") == b"BEGIN\r\n"
    hello = await reader.readuntil(b"Hello\0")
    serial = int.from_bytes(hello[8:12], "little")
    call = Call(NAME, "/", None, "Hello", "", serial=serial)
    message = reply_to(call, "s", [NAME])
    message.serial = 1
    writer.write(encode(message))


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[OtherEnd]:
    ends: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await shake_hands(reader, writer)
        await ends.put((reader, writer))

    taken: list[Call | Signal] = []
    server = await asyncio.start_unix_server(serve, folder / "bus")
    bus = await Bus.open(f"unix:path={folder / 'bus'}", taken.append)
    reader, writer = await ends.get()
    await reader.read(64)  # what pads Hello's header
    yield OtherEnd(bus, reader, writer, taken)
    bus.leave()
    writer.close()
    server.close()


def played(folder: Path, play: Callable[[OtherEnd], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE), connected(folder) as other:
            await play(other)

    asyncio.run(run())


def test_calls_and_signals_are_read(tmp_path: Path) -> None:
    async def play(other: OtherEnd) -> None:
        value = Variant("a(uv)", [[1, Variant("s", "x")]])
        args = [7, "pid", {"odd": value, "text": Variant("s", "y")}]
        call = method_call("org.phos", "/a", "org.phos.A1", "Do", "usa{sv}", args, True)
        other.send(call)
        read = await other.taken_one()
        assert isinstance(read, Call)
        assert (read.sender, read.path) == (":1.2", "/a")
        assert (read.interface, read.member) == ("org.phos.A1", "Do")
        assert (read.signature, read.serial, read.interactive) == ("usa{sv}", 9, True)
        assert read.args == (7, "pid", {"odd": [[1, "x"]], "text": "y"})
        other.send(signal_from("/b", "org.phos.B1", "Done", "as", [["x", "y"]]))
        heard = await other.taken_one()
        assert isinstance(heard, Signal)
        assert (heard.path, heard.member, heard.args) == ("/b", "Done", (["x", "y"],))

    played(tmp_path, play)


def test_what_comes_in_pieces_is_read(tmp_path: Path) -> None:
    async def play(other: OtherEnd) -> None:
        message = signal_from("/b", "org.phos.B1", "Done", "s", ["x" * 100])
        message.serial = 2
        for byte in encode(message):
            other.writer.write(bytes([byte]))
            await other.writer.drain()
            await asyncio.sleep(0)
        heard = await other.taken_one()
        assert isinstance(heard, Signal)
        assert heard.args == ("x" * 100,)

    played(tmp_path, play)


def test_strangers_signatures_are_not_kept(tmp_path: Path) -> None:
    odd = "a(a(yyyyyy)a{yv}nqnqnq)"

    async def play(other: OtherEnd) -> None:
        tree = SignatureTree(odd)
        call = method_call("org.phos", "/", "a.b", "C", "v", [Variant(tree, [])], False)
        other.send(call)
        read = await other.taken_one()
        assert isinstance(read, Call)
        assert read.args == ([],)
        assert odd not in SignatureTree._cache

    played(tmp_path, play)


def test_a_message_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    async def play(other: OtherEnd) -> None:
        message = signal_from("/b", "org.phos.B1", "Wrong", "s", [""])
        message.serial = 2
        other.writer.write(encode(message).replace(b"Wrong", b"Wr\xffng"))
        other.send(signal_from("/b", "org.phos.B1", "Done", "s", ["right"]))
        heard = await other.taken_one()
        assert isinstance(heard, Signal)
        assert heard.args == ("right",)

    played(tmp_path, play)


def test_values_that_nobody_reads_are_not_decoded(tmp_path: Path) -> None:
    """Anybody may send a signal that takes long to decode, or that cannot be decoded."""

    async def play(other: OtherEnd) -> None:
        message = signal_from("/b", "org.phos.B1", "Done", "s", ["wrong"])
        message.serial = 2
        other.writer.write(encode(message).replace(b"wrong", b"wr\xffng"))
        heard = await other.taken_one()
        assert isinstance(heard, Signal) and heard.member == "Done"
        with pytest.raises(UnicodeDecodeError):
            _ = heard.args

    played(tmp_path, play)


def test_replies_reach_who_waits(tmp_path: Path) -> None:
    async def play(other: OtherEnd) -> None:
        for error in ("", "org.phos.Error.Busy"):
            message = method_call("org.phos", "/", "a.b", "C", "", [], False)
            asking = asyncio.create_task(other.bus.ask(message))
            head = await other.reader.readexactly(16)
            serial = int.from_bytes(head[8:12], "little")
            await other.reader.read(4096)
            call = Call(NAME, "/", None, "C", "", serial=serial)
            other.send(reply_to(call, "sv", ["why", Variant("ai", [1])], error))
            reply = await asking
            assert reply is not None
            assert reply.error_name == (error or None)
            assert reply.body == ["why", Variant("ai", [1])]

    played(tmp_path, play)


def test_what_is_encoded_already_is_sent_as_it_is(tmp_path: Path) -> None:
    async def play(other: OtherEnd) -> None:
        large = b"x" * (1 << 22)
        first, second = other.bus.put_bytes(large), other.bus.put_bytes(b"end")
        assert other.bus.outgoing == 2
        assert await other.reader.readexactly(len(large) + 3) == large + b"end"
        await first
        await second
        assert other.bus.outgoing == 0

    played(tmp_path, play)


def test_a_bus_that_is_full_is_waited_for(tmp_path: Path) -> None:
    """The socket is full between two messages, too."""

    async def play(other: OtherEnd) -> None:
        message, count = b"x" * 4096, 2000
        sent = [other.bus.put_bytes(message) for _ in range(count)]
        await asyncio.sleep(0.2)
        assert other.bus.connected
        assert 0 < other.bus.outgoing < count
        assert await other.reader.readexactly(count * len(message)) == message * count
        await asyncio.gather(*sent)

    played(tmp_path, play)


def test_the_end_of_the_bus_is_told(tmp_path: Path) -> None:
    async def play(other: OtherEnd) -> None:
        asking = asyncio.create_task(
            other.bus.ask(method_call("org.phos", "/", "a.b", "C", "", [], False))
        )
        await other.reader.readexactly(16)
        other.writer.close()
        with pytest.raises((EOFError, OSError)):
            await other.bus.wait_for_disconnect()
        with pytest.raises((EOFError, OSError)):
            await asking
        assert not other.bus.connected

    played(tmp_path, play)


def test_leaving_closes_the_socket(tmp_path: Path) -> None:
    async def play(other: OtherEnd) -> None:
        other.bus.leave()
        assert await other.reader.read() == b""
        await other.bus.wait_for_disconnect()
        assert not other.bus.connected

    played(tmp_path, play)


def test_who_is_not_let_in_learns_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bus"))
        with pytest.raises(NoBusError, match="no D-Bus at"):
            asyncio.run(Bus.open(f"unix:path={tmp_path / 'bus'}", print))


def test_a_signature_is_taken_apart() -> None:
    assert complete_types("usa{sv}a(ii)") == ["u", "s", "a{sv}", "a(ii)"]
    assert complete_types("") == []
