"""Computes as ``single`` does, and lies to phosd: a thread stands between it and the real hook.

Arguments: steps, the number of a request, and how its answer is spoilt, or where the chunk map is
that the program writes over. The real hook listens below ``PHOS_RUNTIME_DIR``, phosd looks below
``PHOS_TEST_OUTSIDE``.
"""

import contextlib
import mmap
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gpu import Device, Report, State

HEADER = struct.Struct("<IHHIIII")  # magic, version, type, sequence, status, length, descriptors
DETACH, ARM, MOST = 10, 12, 253
Message = tuple[bytes, bytes, list[int]]


class Gone(Exception):
    """The other end has closed the connection."""


def receive(end: socket.socket) -> Message:
    """Header, payload and descriptors."""
    head, descriptors, _, _ = socket.recv_fds(end, HEADER.size, MOST)
    body = b""
    if len(head) < HEADER.size:
        raise Gone
    while len(body) < HEADER.unpack(head)[5]:
        part = end.recv(1 << 16)
        if not part:
            raise Gone
        body += part
    return head, body, descriptors


def send(end: socket.socket, message: Message) -> None:
    head, body, descriptors = message
    whole = head + body
    sent = socket.send_fds(end, [whole], descriptors)
    if sent < len(whole):  # else the other side may be gone already, and well so
        end.sendall(whole[sent:])
    for descriptor in descriptors:
        os.close(descriptor)


def changed(head: bytes, **fields: int) -> bytes:
    names = ("magic", "version", "type", "sequence", "status", "length", "descriptors")
    return HEADER.pack(*(dict(zip(names, HEADER.unpack(head), strict=True)) | fields).values())


def silence(_: Message) -> Message:
    time.sleep(3600)
    raise Gone


def goodbye(_: Message) -> Message:
    raise Gone


def rubbish(message: Message) -> Message:
    return random.Random(7).randbytes(HEADER.size), message[1], message[2]


def endless(message: Message) -> Message:
    return changed(message[0], length=0xFFFFFFFF), message[1], message[2]


def another(message: Message) -> Message:
    sequence = HEADER.unpack(message[0])[3]
    return changed(message[0], sequence=sequence + 1), message[1], message[2]


def cut(message: Message) -> Message:
    body = message[1][: len(message[1]) // 2]
    return changed(message[0], length=len(body)), body, message[2]


def refusal(message: Message) -> Message:
    body = b"\x1b[2Jno\xff" * 50
    return changed(message[0], status=5, length=len(body)), body, message[2]


def numbers(message: Message) -> Message:
    """Every fourth byte is another one: sizes, ids, counts and states."""
    chance = random.Random(len(message[1]))
    body = bytes(chance.randrange(256) if i % 4 == 3 else b for i, b in enumerate(message[1]))
    return message[0], body, message[2]


def descriptors(message: Message) -> Message:
    """Other things than memory, or one where none belongs."""
    head, body, given = message
    count = len(given) or 1
    for descriptor in given:
        os.close(descriptor)
    kinds: tuple[Callable[[], int], ...] = (
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.memfd_create("small"),
        lambda: os.open("/", os.O_RDONLY),
        lambda: os.eventfd(0),
    )
    return (
        changed(head, descriptors=count),
        body,
        [kinds[i % len(kinds)]() for i in range(count)],
    )


def truth(message: Message) -> Message:
    """Honest until the chunk map that phosd shares with the hook is armed; see :func:`scribble`."""
    return message


def scribble(chunk_map: int, words: slice) -> None:
    """Write over these words of a chunk map, as long as the process lives."""
    chance = random.Random(chunk_map)
    with mmap.mmap(chunk_map, os.fstat(chunk_map).st_size) as shared:
        view = memoryview(shared).cast("I")
        places = range(*words.indices(len(view)))
        while True:
            view[chance.choice(places)] = chance.choice(
                (0, 1, 4, 0xFFFFFFFF, chance.randrange(1 << 32))
            )


BOARDS: dict[str, slice] = {
    "constants": slice(0, 24),
    "phases_and_frees": slice(32, 2200),
    "tables": slice(2200, None),
    "everything": slice(None),
}
"""Where a chunk map is written over: ``phosd/hook/protocol/chunk_map.h`` has the layout."""


LIES: dict[str, Callable[[Message], Message]] = {
    lie.__name__: lie
    for lie in (
        *(silence, goodbye, rubbish, endless, another),
        *(cut, refusal, numbers, descriptors),
    )
}
LIES |= dict.fromkeys(BOARDS, truth)


class Relay:
    """Answers for the hook at ``outside``, asking the one at ``inside``."""

    def __init__(self, outside: Path, inside: Path, request: int, lie: str) -> None:
        self._outside = outside
        self._inside = inside
        self._request = request
        self._lie = LIES[lie]
        self._words = BOARDS.get(lie)
        self._detached = threading.Event()

    def run(self) -> None:
        while True:
            self._detached.clear()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                self._outside.unlink(missing_ok=True)
                listener.bind(str(self._outside))
                listener.listen()
                listener.settimeout(0.01)
                while not self._detached.is_set():
                    with contextlib.suppress(TimeoutError):
                        end, _ = listener.accept()
                        end.settimeout(None)
                        threading.Thread(target=self._serve, args=(end,), daemon=True).start()
            self._outside.unlink()
            while not self._outside.with_suffix(".wake").exists():
                time.sleep(0.001)
            self._inside.with_suffix(".wake").touch()
            while not self._inside.exists():
                time.sleep(0.001)
            self._inside.with_suffix(".wake").unlink()

    def _serve(self, end: socket.socket) -> None:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with end, inner, contextlib.suppress(Gone, OSError):
            inner.connect(str(self._inside))
            while True:
                request = receive(end)
                kind = HEADER.unpack(request[0])[2]
                slabs = len(request[2]) - 1
                chunk_map = os.dup(request[2][0]) if kind == ARM else -1
                send(inner, request)
                answer = receive(inner)
                if kind == DETACH:  # CRIU must meet no socket
                    inner.close()
                    self._detach()
                send(end, self._lie(answer) if kind == self._request else answer)
                if kind == ARM and self._words is not None and slabs > 0:  # not only watched
                    scribbler = threading.Thread(target=scribble, args=(chunk_map, self._words))
                    scribbler.daemon = True
                    scribbler.start()
                if kind == DETACH:
                    return

    def _detach(self) -> None:
        self._detached.set()
        while self._outside.exists():
            time.sleep(0.001)


def main() -> None:
    report = Report()
    state = State(Device())
    name = f"hook/{os.geteuid()}/{os.getpid()}.sock"
    outside, inside = (Path(os.environ[n]) for n in ("PHOS_TEST_OUTSIDE", "PHOS_RUNTIME_DIR"))
    relay = Relay(outside / name, inside / name, int(sys.argv[2]), sys.argv[3])
    threading.Thread(target=relay.run, daemon=True).start()
    for step in report.steps():
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
