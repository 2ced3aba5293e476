"""Provide a fake hook for the test's own process, whose replies the test decides."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phosd.engine.hook_client import wire
from phosd.engine.hook_client.code_images import CodeImage
from phosd.engine.hook_client.places import socket_path
from phosd.engine.hook_client.wire import HEADER, MAGIC, REPLY, VERSION


@dataclass
class Request:
    """A request of the client."""

    type: int
    sequence: int
    payload: bytes
    descriptors: list[int]


@dataclass
class Answer:
    """A reply of the fake hook, sent in full, or only its first ``cut`` bytes."""

    payload: bytes = b""
    descriptors: list[int] = field(default_factory=list)
    status: int = 0
    count: int | None = None
    cut: int | None = None
    changed: Callable[[bytes], bytes] = lambda message: message
    close: bool = False
    """Close the connection afterwards."""

    def message(self, request: Request) -> bytes:
        """Return the bytes to send."""
        count = len(self.descriptors) if self.count is None else self.count
        head = (MAGIC, VERSION, request.type | REPLY, request.sequence, self.status)
        whole = HEADER.pack(*head, len(self.payload), count) + self.payload
        return self.changed(whole)[: self.cut]


Script = Callable[[Request], Answer]


@contextlib.contextmanager
def fake_hook(runtime: Path, script: Script) -> Iterator[list[Request]]:
    """Let ``script`` answer as the hook of this process; yields the list of received requests."""
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    seen: list[Request] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(8)
        over = threading.Event()
        thread = threading.Thread(target=_serve, args=(listener, script, seen, over))
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            path.unlink(missing_ok=True)
            thread.join(20)
            assert not thread.is_alive()


def _serve(
    listener: socket.socket, script: Script, seen: list[Request], over: threading.Event
) -> None:
    while not over.is_set():
        try:
            connection, _ = listener.accept()
        except OSError:  # shut down
            return
        with connection, contextlib.suppress(OSError):  # the client went away
            connection.settimeout(10)
            while _answer(connection, script, seen):
                pass


def _answer(connection: socket.socket, script: Script, seen: list[Request]) -> bool:
    head, descriptors, _, _ = socket.recv_fds(connection, HEADER.size, wire.MAX_DESCRIPTORS)
    if len(head) != HEADER.size:
        return False
    _, _, type_, sequence, _, length, _ = HEADER.unpack(head)
    payload = b""
    while len(payload) < length:
        payload += connection.recv(length - len(payload))
    request = Request(type_, sequence, payload, descriptors)
    seen.append(request)
    answer = script(request)
    message = answer.message(request)
    if message:
        sent = socket.send_fds(connection, [message], answer.descriptors)
        connection.sendall(message[sent:])
    for descriptor in descriptors:
        os.close(descriptor)
    return not answer.close and answer.cut is None


DEVICE = bytes(range(16))
"""UUID of the device in a hello."""


def hello(
    pid: int = 1,
    state: int = 0,
    parkable: int = 1,
    reason: bytes = b"",
    devices: Sequence[bytes] = (DEVICE,),
) -> bytes:
    """Return the payload of a hello."""
    head = wire.HELLO.pack(pid, 13000, len(devices), state, parkable, 0, 0, 0, reason)
    return head + b"".join(devices)


def blocks(*rows: tuple[int, int], more: int = 0) -> bytes:
    """Return a block list of (id, flags), 2 MiB each, on device 0."""
    head = wire.BLOCK_LIST.pack(len(rows), more, 0, rows[-1][0] if rows else 0)
    body = b"".join(wire.BLOCK.pack(i, i << 21, 2 << 20, 0, flags) for i, flags in rows)
    return head + body


def gate(*, settled: int = 0, busy: int = 0, waiting: int = 0, capturing: int = 0) -> bytes:
    """Return the state of a closing gate."""
    return wire.GATE_STATE.pack(settled, busy, waiting, capturing, 0, 0, 0)


def kernels(*rows: tuple[str, int], more: int = 0) -> bytes:
    """Return a kernel list of (name, launches): suspects of module 7."""
    body = b"".join(
        wire.KERNEL.pack(7, launches, 1, len(name)) + name.encode() for name, launches in rows
    )
    return wire.ROW_LIST.pack(len(rows), more) + body


def launches(*rows: tuple[str, int], module: int, more: int = 0) -> bytes:
    """Return a list of a module's kernels, (name, launches), of which no table says anything."""
    body = b"".join(
        wire.LAUNCHED_KERNEL.pack(module, count, 0, 0, 0, 0, 0, len(name)) + name.encode()
        for name, count in rows
    )
    return wire.ROW_LIST.pack(len(rows), more) + body


def images(*rows: CodeImage, more: int = 0) -> bytes:
    """Return a list of images."""
    body = b"".join(
        wire.IMAGE.pack(each.hash, each.address, each.size, each.held, len(each.path.encode()))
        + each.path.encode()
        for each in rows
    )
    return wire.ROW_LIST.pack(len(rows), more) + body


def release(state: int, reason: bytes = b"") -> bytes:
    """Return the progress of emptying PyTorch's cache."""
    return wire.RELEASE_STATE.pack(state, 0, reason)


def count(number: int) -> bytes:
    """Return a count."""
    return struct.pack("<Q", number)


def files(number: int) -> list[int]:
    """Return ``number`` descriptors of new memory files, which stand for memory blocks."""
    return [os.memfd_create("block") for _ in range(number)]


def open_files() -> int:
    """Return how many descriptors of such files this process has open."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or another thread's
            found += "memfd:block" in str(entry.readlink())
    return found
