"""The mover's protocol: frames with descriptors, and what a broken peer does to it."""

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phosd.engine.image.manifest import ChunkRef
from phosd.engine.mover.protocol import connection, wire
from phosd.engine.mover.protocol.connection import Connection, PeerGone
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, PhosError, Timeout


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    pair = [Connection(end) for end in socket.socketpair()]
    yield pair[0], pair[1]
    for end in pair:
        end.close()


TARGET = wire.Packs([(7, 1 << 30)], "id", 1000)
MESSAGES: list[wire.Message] = [
    wire.Attach(bytes(64)),
    wire.Leave(),
    wire.Guard([(7, 12345, 1, 2**63 - 1)]),
    wire.Unguard([ProcessId(7, 12345)]),
    wire.ListParked(),
    wire.Adopt([(1, 2 << 20), (2**63 - 1, 4096)]),
    wire.Adopt([(1, 2 << 20)], home=3),
    wire.Create([]),
    wire.CreateTogether([(8, 4096), (9, 8192)]),
    wire.Drop([3]),
    wire.Digest([1, 2]),
    wire.Save([(1, bytes(32))], TARGET, [ChunkRef("ab" * 16, 1, 4096, 9)]),
    wire.Drain(
        [wire.DrainedBoard(3, [wire.DrainedBlock(1, 7, bytes(16), b"\1", b"")], [9], 64)],
        TARGET,
        audit=True,
        patience=9.5,
    ),
    wire.Settled(),
    wire.Copy([(1, 2, -1, 0), (1, 3, 0, 4096)], TARGET, [8192], b"d" * 32),
    wire.Pin(),
    wire.Unpin(3),
    wire.Load([(1, [ChunkRef("00" * 16, 0, 0, 16)])], [0]),
    wire.Fetch([(1, 2, [0, 5]), (3, 4, [])]),
    wire.FreeMemory(),
    wire.Reserve(1 << 40, [ProcessId(7, 12345)]),
    wire.Cancel(),
    wire.Done(),
    wire.Failed("Timeout", "what", "hint"),
    wire.Moved(1),
    wire.Digests([(1, bytes(16))]),
    wire.Stored([(1, [ChunkRef("ff" * 16, 1, 0, 1)])], [(1, 0)]),
    wire.Copied([(0, 4096, 16)], bytes(16)),
    wire.Dropped([4, 5]),
    wire.Drained(
        *([(1, [None, ChunkRef("ff" * 16, 1, 0, 1)])], [(1, 0)], 2, 4096, 0.5, 1.5),
        *(False, [3], None),
    ),
    wire.Pinned(3),
    wire.Memory(1, 2),
    wire.Parked([(7, 12345, 1)], [ProcessId(8, 1)]),
    wire.Farewell(stays=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_sent(
    ends: tuple[Connection, Connection], message: wire.Message
) -> None:
    ends[0].send(77, message)
    assert ends[1].receive(5) == (77, message, [])


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.sampled_from([0, 1, 199, 200, 201, 450]), min_size=1, max_size=3))
def test_descriptors_arrive_with_their_message(
    ends: tuple[Connection, Connection], counts: list[int]
) -> None:
    null = os.open("/dev/null", os.O_RDONLY)

    def send() -> None:
        for sequence, count in enumerate(counts):
            ends[0].send(sequence, wire.Digest(list(range(sequence * 40000))), [null] * count)

    thread = threading.Thread(target=send)
    thread.start()
    for sequence, count in enumerate(counts):
        received = ends[1].receive(20)
        assert received is not None
        assert received[0] == sequence
        assert len(set(received[2])) == count
        for fd in received[2]:
            assert os.fstat(fd).st_rdev == os.fstat(null).st_rdev
            assert not os.get_inheritable(fd)
            os.close(fd)
    thread.join()
    os.close(null)


def test_silence_is_no_message_and_an_end_is_an_error(ends: tuple[Connection, Connection]) -> None:
    assert ends[1].receive(0.01) is None
    ends[0].close()
    with pytest.raises(PeerGone):
        ends[1].receive(5)
    with pytest.raises(PeerGone):
        for _ in range(3):
            ends[1].send(1, wire.Done())


@given(st.binary(max_size=64))
def test_rubbish_is_an_error(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        with pytest.raises((PhosError, ValueError)):
            for _ in range(10):
                Connection(theirs).receive(5)


def test_a_frame_cut_anywhere_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    Connection(ours).send(1, MESSAGES[4])
    whole = theirs.recv(65536)
    for cut in range(1, len(whole)):
        ours, theirs = socket.socketpair()
        with theirs:
            ours.sendall(whole[:cut])
            ours.close()
            with pytest.raises(PeerGone):
                Connection(theirs).receive(5)


def test_a_frame_that_stops_is_a_timeout(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PART_SECONDS", 0.05)
    os.write(ends[0].fileno(), b"\x20\0\0\0\0\0\0\0\1\0\0\0abc")
    with pytest.raises(Timeout, match="stopped in its middle"):
        ends[1].receive(5)


def test_an_absurd_size_is_refused(ends: tuple[Connection, Connection]) -> None:
    os.write(ends[0].fileno(), b"\xff\xff\xff\xff\0\0\0\0\1\0\0\0")
    with pytest.raises(Internal, match="4294967295 bytes"):
        ends[1].receive(5)


def test_other_messages_are_another_version() -> None:
    """A mover of an earlier phosd may still run: it must not be taken for one that knows them."""
    kinds = {*get_args(wire.Request), *get_args(wire.Reply), ChunkRef}
    kinds |= {wire.Packs, wire.DrainedBlock, wire.DrainedBoard}
    fields = sorted((kind.__name__, kind.__struct_fields__) for kind in kinds)
    found = hashlib.sha256(repr(fields).encode()).hexdigest()[:16]
    assert (wire.VERSION, found) == (3, "16777af8c8d73f86"), (
        "raise VERSION, and note the digest here"
    )
