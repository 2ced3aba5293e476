"""Two worker processes feed the program: one through pipes, one through a unix socket and shared
memory. They are forked before CUDA starts, as data loaders are, and have a state of their own.
"""

import hashlib
import mmap
import os
import socket
from typing import Protocol

from gpu import Device, Report, State, write

BATCH = 48 << 10


class Generator:
    """Batches that depend on every request ever made."""

    def __init__(self, name: bytes) -> None:
        self._state = hashlib.blake2b(name)

    def batch(self, request: bytes) -> bytes:
        self._state.update(request)
        block = self._state.digest()
        return block * (BATCH // len(block))


class Feed(Protocol):
    """Where batches come from."""

    def batch(self, request: bytes) -> bytes: ...


def read_exactly(descriptor: int, size: int) -> bytes:
    """``size`` bytes, or the end of the process: its peer is gone."""
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class PipeFeed:
    """A worker behind two pipes."""

    def __init__(self) -> None:
        read_request, self._requests = os.pipe()
        self._batches, write_batch = os.pipe()
        self._worker = os.fork()
        if self._worker == 0:
            os.close(self._requests)
            os.close(self._batches)
            generator = Generator(b"pipe")
            while True:
                write_all(write_batch, generator.batch(read_exactly(read_request, 8)))
        os.close(read_request)
        os.close(write_batch)

    def batch(self, request: bytes) -> bytes:
        write_all(self._requests, request)
        return read_exactly(self._batches, BATCH)

    def end(self) -> None:
        """Let the worker, which sees that its pipe has no other end, end."""
        os.close(self._requests)
        os.close(self._batches)
        os.waitpid(self._worker, 0)


class SharedFeed:
    """A worker that is asked through a unix socket and answers in shared memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BATCH)
        self._socket, theirs = socket.socketpair()
        if os.fork() == 0:
            self._socket.close()
            generator = Generator(b"shared")
            while True:
                self._memory[:] = generator.batch(read_exactly(theirs.fileno(), 8))
                theirs.sendall(b"k")
        theirs.close()

    def batch(self, request: bytes) -> bytes:
        self._socket.sendall(request)
        read_exactly(self._socket.fileno(), 1)
        return self._memory[:]


def main() -> None:
    feeds: list[Feed] = [PipeFeed(), SharedFeed()]
    report = Report()
    state = State(Device(), cold_block=256 << 10)
    for step in report.steps():
        request = report.seed.to_bytes(8, "little")
        for place, feed in enumerate(feeds):
            write(state.window(step) + place * BATCH, feed.batch(request))
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
