"""A process that owns device memory, as a program under the hook: makes, fills and exports it.

The test's side is :class:`Owner`; run as a script, this file is the process.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phosd.engine.system.cuda import call, driver

ROOT = Path(__file__).parents[3]
_BATCH = 200


class Owner:
    """The process. Blocks go by their index; descriptors that it sends are the test's to close."""

    def __init__(self, connection: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        self._socket = connection
        self._process = process
        self._lines = connection.makefile("rb")

    def create(self, sizes: Sequence[int]) -> list[int]:
        """Make blocks of ``sizes`` bytes and export them."""
        self._order("create", sizes=list(sizes))
        return receive(self._socket, len(sizes))

    def attach(self, descriptors: Sequence[int], sizes: Sequence[int]) -> None:
        """Import and map memory that somebody else made; it gets the next indices."""
        self._order("attach", sizes=list(sizes))
        send(self._socket, descriptors)
        self._answer()

    def write(self, index: int, data: bytes, offset: int = 0) -> None:
        """Write bytes into a block."""
        self._order("write", index=index, offset=offset, size=len(data))
        self._socket.sendall(data)
        self._answer()

    def read(self, index: int) -> bytes:
        """The bytes of a block."""
        self._order("read", index=index)
        return self._lines.read(self._answer())

    def copy(self, source: tuple[int, int], target: tuple[int, int], size: int) -> None:
        """Copy bytes on the device; a place is (index, offset)."""
        self._order("copy", source=source, target=target, size=size)
        self._answer()

    def kill(self) -> None:
        """End the process, as SIGKILL does."""
        self._process.kill()
        self._process.wait()

    def _order(self, order: str, **details: Any) -> None:
        self._socket.sendall(json.dumps({"order": order, **details}).encode() + b"\n")

    def _answer(self) -> int:
        return int(self._lines.readline())


@contextlib.contextmanager
def running(environment: "dict[str, str] | None" = None) -> Iterator[Owner]:
    """An owner, ended afterwards."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
        )
    try:
        with ours:
            yield Owner(ours, process)
    finally:
        process.kill()
        process.wait()


def send(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Pass descriptors, in as many messages as it takes."""
    for at in range(0, len(descriptors), _BATCH):
        socket.send_fds(connection, [b"."], descriptors[at : at + _BATCH])


def receive(connection: socket.socket, count: int) -> list[int]:
    """Take ``count`` descriptors."""
    found: list[int] = []
    while len(found) < count:
        data, fds, _, _ = socket.recv_fds(connection, 1, _BATCH)
        assert data, "the owner died"
        found += fds
    return found


class _Memory:
    """The process's own blocks."""

    def __init__(self) -> None:
        b = driver()
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 0))
        self._kind = b.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        location = b.CUmemLocation()
        location.type = b.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = b.CUmemAllocationProp()
        self._properties.type = b.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = self._kind
        self._properties.location = location
        self._access = b.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = b.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.blocks: list[tuple[int, int]] = []

    def create(self, size: int) -> int:
        handle = call("cuMemCreate", size, self._properties, 0)
        self._map(handle, size)
        return int(call("cuMemExportToShareableHandle", handle, self._kind, 0))

    def attach(self, fd: int, size: int) -> None:
        self._map(call("cuMemImportFromShareableHandle", fd, self._kind), size)

    def _map(self, handle: Any, size: int) -> None:
        address = int(call("cuMemAddressReserve", size, 0, 0, 0))
        call("cuMemMap", address, size, 0, handle, 0)
        call("cuMemSetAccess", address, size, [self._access], 1)
        self.blocks.append((address, size))


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    memory = _Memory()
    while line := _line(connection):
        order = json.loads(line)
        match order["order"]:
            case "create":
                fds = [memory.create(size) for size in order["sizes"]]
                send(connection, fds)
                for fd in fds:
                    os.close(fd)
            case "attach":
                for fd, size in zip(
                    receive(connection, len(order["sizes"])), order["sizes"], strict=True
                ):
                    memory.attach(fd, size)
                connection.sendall(b"0\n")
            case "write":
                data = connection.recv(order["size"], socket.MSG_WAITALL)
                address, _ = memory.blocks[order["index"]]
                call("cuMemcpyHtoD", address + order["offset"], data, len(data))
                connection.sendall(b"0\n")
            case "copy":
                (to, to_offset), (at, offset) = order["target"], order["source"]
                target = memory.blocks[to][0] + to_offset
                call("cuMemcpyDtoD", target, memory.blocks[at][0] + offset, order["size"])
                call("cuCtxSynchronize")
                connection.sendall(b"0\n")
            case "read":
                address, size = memory.blocks[order["index"]]
                content = bytearray(size)
                call("cuMemcpyDtoH", content, address, size)
                connection.sendall(b"%d\n" % size)
                connection.sendall(content)


def _line(connection: socket.socket) -> bytes:
    """One line, byte by byte: what follows it may be descriptors."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    _main()
