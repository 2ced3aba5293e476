"""The hook's client against a hook that answers well, refuses, lies, or breaks off."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phosd import unix_sockets
from phosd.engine.hook_client import received, wire
from phosd.engine.hook_client.code_images import Held
from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.hook_client.wire import IMAGE, ROW_LIST, BlockFlag, Status, Type
from phosd.errors import (
    Busy,
    Internal,
    NoSuchProcess,
    OutOfMemory,
    PhosError,
    Timeout,
    Unsupported,
)
from tests.support.fake_hook import (
    Answer,
    Request,
    blocks,
    count,
    fake_hook,
    files,
    gate,
    hello,
    kernels,
    open_files,
    release,
)

HAS = int(BlockFlag.HAS_DESCRIPTOR)

# -- what a good hook answers -------------------------------------------------------------------


def test_hello(runtime: Path) -> None:
    body = hello(pid=7, state=3, reason=b"for \x1b[31mno\xff reason")
    with fake_hook(runtime, lambda _: Answer(body)), HookLink(os.getpid(), runtime) as link:
        said = link.hello()
    assert (said.pid, said.state, said.parkable) == (7, HookState.PARKED, True)
    assert said.reason.isprintable(), "a program must not steer the reader's terminal"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (b"it does\0multicast", "multicast"),
        (b"it does", ""),  # as of an older hook
        (b"it does\0\0multicast", ""),
        (b"it does\0Multi cast", ""),
        (b"it does\0multicast\0", "multicast"),
        (b"x" * 256, ""),
        (b"\0" * 256, ""),
        (b"it does\0" + b"a" * 200, ""),
    ],
)
def test_a_reason_has_a_code_behind_it(runtime: Path, reason: bytes, code: str) -> None:
    body = hello(parkable=0, reason=reason)
    with fake_hook(runtime, lambda _: Answer(body)), HookLink(os.getpid(), runtime) as link:
        assert link.hello().code == code


def test_blocks_come_in_pages(runtime: Path) -> None:
    pages = {0: [(1, HAS), (2, 0), (5, HAS)], 5: [(6, HAS)]}
    given_away: list[int] = []

    def script(request: Request) -> Answer:
        (after,) = struct.unpack("<Q", request.payload)
        rows = pages[after]
        holders = files(sum(flags & HAS for _, flags in rows))
        given_away.extend(holders)
        return Answer(blocks(*rows, more=after == 0), holders)

    before = open_files()
    with fake_hook(runtime, script), HookLink(os.getpid(), runtime) as link:
        found = dict(link.export_blocks())
        for number, descriptor in found.items():
            assert (descriptor is not None) == bool(number.flags & HAS)
            if descriptor is not None:
                os.close(descriptor)
    for descriptor in given_away:
        os.close(descriptor)
    assert [block.id for block in found] == [1, 2, 5, 6]
    assert open_files() == before


def test_descriptors_that_nobody_took_are_closed(runtime: Path) -> None:
    mine = files(3)
    body = blocks((1, HAS), (2, HAS), (3, HAS))
    with fake_hook(runtime, lambda _: Answer(body, mine)), HookLink(os.getpid(), runtime) as link:
        before = open_files()
        exported = link.export_blocks()
        _, taken = next(exported)
        exported.close()  # type: ignore[attr-defined]
        assert taken is not None
        assert open_files() == before + 1
        os.close(taken)
    for descriptor in mine:
        os.close(descriptor)


def test_memory_is_handed_back_in_batches(runtime: Path) -> None:
    number = 2 * wire.MAX_DESCRIPTORS + 3
    mine = files(number)

    def script(request: Request) -> Answer:
        if request.type == Type.UNPARK_BLOCKS:
            (length,) = struct.unpack_from("<Q", request.payload)
            assert length == len(request.descriptors) == len(request.payload) // 8 - 1
            return Answer(count(length))
        return Answer(count(number))

    with fake_hook(runtime, script) as seen, HookLink(os.getpid(), runtime) as link:
        assert link.unpark(zip(range(10, 10 + number), mine, strict=True)) == number
    for descriptor in mine:
        os.close(descriptor)
    ids = [i for r in seen[:-1] for i in struct.unpack(f"<{len(r.payload) // 8}Q", r.payload)[1:]]
    assert ids == list(range(10, 10 + number))
    assert seen[-1].type == Type.UNPARK


@pytest.mark.parametrize("deadline", [-1.0, 0.0, 1e300, float("inf")])
def test_a_deadline_of_any_size(runtime: Path, deadline: float) -> None:
    with fake_hook(runtime, lambda _: Answer(gate(settled=1))) as seen:
        with HookLink(os.getpid(), runtime) as link:
            assert link.close_gate(min(deadline, 1e9), for_peers=1).settled
        milliseconds, wait, peers = struct.unpack("<III", seen[0].payload)
    assert wait == 2000 and peers == 1 and milliseconds in (0, (1 << 32) - 1)


ERRORS = {
    Status.BAD_MESSAGE: Internal,
    Status.WRONG_STATE: Busy,
    Status.UNSUPPORTED: Unsupported,
    Status.BUSY: Busy,
    Status.DRIVER: Internal,
    Status.OUT_OF_MEMORY: OutOfMemory,
    99: Internal,
}


@pytest.mark.parametrize("status", ERRORS)
def test_a_refusal_has_its_type_and_the_hooks_words(runtime: Path, status: int) -> None:
    mine = files(1)
    script = lambda _: Answer(b"no \x1b way", mine, status)  # noqa: E731
    with fake_hook(runtime, script), HookLink(os.getpid(), runtime) as link:
        before = open_files()
        with pytest.raises(ERRORS[status], match=r"no \? way") as raised:
            next(link.export_blocks())
        assert raised.value.hint
        assert link.connected == (status != Status.BAD_MESSAGE)
        assert open_files() == before
    os.close(mine[0])


# -- what a bad one answers ---------------------------------------------------------------------

GOOD = {
    Type.HELLO: (hello(), 0),
    Type.EXPORT_BLOCKS: (blocks((1, HAS), (2, HAS)), 2),
    Type.CLOSE_GATE: (gate(settled=1), 0),
    Type.PARK: (count(3), 0),
    Type.KERNELS: (kernels(("axpy", 3), ("gemm", 1)), 0),
    Type.EMPTY_CACHE: (release(2), 0),
}


def call(link: HookLink, type_: Type) -> None:
    """The request of that type; closes the descriptors that it brings."""
    if type_ is Type.HELLO:
        link.hello()
    elif type_ is Type.CLOSE_GATE:
        link.close_gate(1)
    elif type_ is Type.PARK:
        link.park()
    elif type_ is Type.KERNELS:
        link.kernels()
    elif type_ is Type.EMPTY_CACHE:
        link.empty_cache(ask=True)
    else:
        for _, descriptor in link.export_blocks():
            if descriptor is not None:
                os.close(descriptor)


@pytest.mark.parametrize("type_", GOOD)
def test_an_answer_that_breaks_off_anywhere(runtime: Path, type_: Type) -> None:
    body, number = GOOD[type_]
    mine = files(number)
    cuts = range(wire.HEADER.size + len(body))
    left = iter(cuts)
    with fake_hook(runtime, lambda _: Answer(body, mine, cut=next(left))):
        before = open_files()
        for _ in cuts:
            with HookLink(os.getpid(), runtime, 5) as link:
                with pytest.raises(NoSuchProcess, match="went away"):
                    call(link, type_)
                assert not link.connected
        assert open_files() == before
    for descriptor in mine:
        os.close(descriptor)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    type_=st.sampled_from(list(GOOD)),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_garbled_bytes_raise_our_errors_and_leak_nothing(
    garbling: "Garbling", type_: Type, flips: list[tuple[int, int]]
) -> None:
    before = open_files()
    garbling.now = (type_, flips)
    with HookLink(os.getpid(), garbling.runtime, 0.3) as link:
        try:
            call(link, type_)
        except PhosError as error:
            assert error.hint
    assert open_files() == before


class Garbling:
    """A fake hook for many examples; ``now`` is what it garbles."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.now: tuple[Type, list[tuple[int, int]]] = (Type.HELLO, [])
        self.files = files(2)

    def script(self, request: Request) -> Answer:
        type_, flips = self.now
        body, number = GOOD[type_]
        first = struct.unpack("<Q", request.payload)[0] if type_ is Type.EXPORT_BLOCKS else 0
        if first:  # a garbled "more"
            return Answer(blocks(), close=True)

        def changed(message: bytes) -> bytes:
            raw = bytearray(message)
            for place, bits in flips:
                raw[place % len(raw)] ^= bits
            return bytes(raw)

        # The connection ends, since a garbled length makes the client wait for the rest.
        return Answer(body, self.files[:number], changed=changed, close=True)


@pytest.fixture
def garbling(runtime: Path) -> Iterator[Garbling]:
    made = Garbling(runtime)
    with fake_hook(runtime, made.script):
        yield made
    for descriptor in made.files:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("body", "descriptors", "what"),
    [
        (blocks((1, HAS), (2, HAS)), 1, "1 descriptors for 2 blocks"),
        (blocks((1, HAS)), 2, "2 descriptors for 1 blocks"),
        (blocks((1, 0)), 1, "1 descriptors for 0 blocks"),
        (blocks((2, HAS), (1, HAS)), 2, "order"),
        (blocks((1, HAS), (1, HAS)), 2, "order"),
        (blocks((0, HAS), more=1), 1, "order"),
        (blocks((1, HAS))[:-1], 1, "for 1 blocks"),
        (b"", 1, "0 bytes"),
    ],
)
def test_block_lists_that_cannot_be(
    runtime: Path, body: bytes, descriptors: int, what: str
) -> None:
    """Among them one that would be asked for without end."""
    mine = files(descriptors)
    with fake_hook(runtime, lambda _: Answer(body, mine)), HookLink(os.getpid(), runtime) as link:
        before = open_files()
        with pytest.raises(Internal, match=what):
            list(link.export_blocks())
        assert not link.connected
        assert open_files() == before
    for descriptor in mine:
        os.close(descriptor)


def test_kernels_come_in_parts(runtime: Path) -> None:
    parts = {0: kernels(("a", 5), ("b" * 4096, 1), more=1), 2: kernels(("c", 2))}
    with (
        fake_hook(runtime, lambda r: Answer(parts[struct.unpack("<Q", r.payload)[0]])),
        HookLink(os.getpid(), runtime) as link,
    ):
        found = link.kernels()
    assert [(k.name[:1], len(k.name), k.launches) for k in found] == [
        ("a", 1, 5),
        ("b", 4096, 1),
        ("c", 1, 2),
    ]
    assert {(k.module, k.suspect) for k in found} == {(7, True)}


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (kernels(("a", 1))[:-1], "a kernel's name of 1 bytes"),
        (kernels(("a", 1)) + b"x", "for 1 kernels"),
        (kernels(("a" * 4097, 1)), "4097 bytes"),
        (kernels(("a", 1))[:12], "instead of 24"),
        (kernels(*[("a", 1)] * 2000, more=1), "more than"),
    ],
)
def test_kernel_lists_that_cannot_be(runtime: Path, body: bytes, what: str) -> None:
    """Among them one that would be asked for without end."""
    with fake_hook(runtime, lambda _: Answer(body)), HookLink(os.getpid(), runtime) as link:
        with pytest.raises(Internal, match=what):
            link.kernels()
        assert not link.connected


def code_images(*of: tuple[str, int], more: int = 0) -> bytes:
    rows = (IMAGE.pack(7, 4096, 50, held, len(path)) + path.encode() for path, held in of)
    return ROW_LIST.pack(len(of), more) + b"".join(rows)


def test_images_come_in_parts(runtime: Path) -> None:
    parts = {0: code_images(("", 1), ("/a.cubin", 3), more=1), 2: code_images(("", 0))}
    with (
        fake_hook(runtime, lambda r: Answer(parts[struct.unpack("<Q", r.payload)[0]])),
        HookLink(os.getpid(), runtime) as link,
    ):
        found = link.images()
    assert [(image.path, image.held) for image in found] == [
        ("", Held.IN_OBJECT),
        ("/a.cubin", Held.IN_FILE),
        ("", Held.NOT_KEPT),
    ]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (code_images(("a", 3))[:-1], "a path of 1 bytes"),
        (code_images(("a", 3)) + b"x", "for 1 images"),
        (code_images(("a" * 4097, 3)), "4097 bytes"),
        (code_images(("a", 4)), "held in 4"),
        (code_images(("a", 3))[:12], "instead of 32"),
        (code_images(*[("", 1)] * 2000, more=1), "more than"),
    ],
)
def test_image_lists_that_cannot_be(runtime: Path, body: bytes, what: str) -> None:
    with fake_hook(runtime, lambda _: Answer(body)), HookLink(os.getpid(), runtime) as link:
        with pytest.raises(Internal, match=what):
            link.images()
        assert not link.connected


def test_arming_sends_the_board_and_the_slabs(runtime: Path) -> None:
    mine = files(3)
    with (
        fake_hook(runtime, lambda _: Answer(count(9))) as seen,
        HookLink(os.getpid(), runtime) as link,
    ):
        assert link.arm(mine[0], mine[1:]) == 9
        assert link.disarm() == 9
        assert link.rehome([4, 5]) == 9
    assert [request.type for request in seen] == [Type.ARM, Type.DISARM, Type.REHOME]
    assert seen[0].payload == struct.pack("<II", 2, 0)
    assert len(seen[0].descriptors) == 3
    assert seen[2].payload == struct.pack("<3Q", 2, 4, 5)
    for descriptor in mine:
        os.close(descriptor)


def test_files_on_a_disk_may_be_closed(tmp_path: Path) -> None:
    """So may memory, devices and pipes."""
    with (tmp_path / "file").open("wb") as file, open(os.devnull) as device:  # noqa: PTH123
        ends = os.pipe()
        everything = [file.fileno(), device.fileno(), *ends, *files(1)]
        assert received.without_files_of_others(everything) == everything
        for descriptor in everything[2:]:
            os.close(descriptor)


def test_descriptors_where_none_belong(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are received, judged and closed; else the kernel would close them, whatever they are. A
    kernel that can passes none (tests/system/service/test_lingering.py).
    """
    monkeypatch.setattr(unix_sockets, "PASS_RIGHTS", 0x7FFF)
    mine = files(4)
    with (
        fake_hook(runtime, lambda _: Answer(hello(), mine)),
        HookLink(os.getpid(), runtime) as link,
    ):
        before = open_files()
        with pytest.raises(Internal, match="does not fit"):
            link.hello()
        assert open_files() == before
    for descriptor in mine:
        os.close(descriptor)


def test_a_count_of_descriptors_that_is_wrong(runtime: Path) -> None:
    mine = files(2)
    body = blocks((1, HAS), (2, HAS), (3, HAS))
    script = lambda _: Answer(body, mine, count=3)  # noqa: E731
    with fake_hook(runtime, script), HookLink(os.getpid(), runtime) as link:
        before = open_files()
        with pytest.raises(Internal, match="does not fit"):
            list(link.export_blocks())
        assert open_files() == before
    for descriptor in mine:
        os.close(descriptor)


def test_a_state_that_does_not_exist(runtime: Path) -> None:
    body = hello(state=4)
    with fake_hook(runtime, lambda _: Answer(body)), HookLink(os.getpid(), runtime) as link:
        with pytest.raises(Internal, match="state"):
            link.hello()
        assert not link.connected


def test_blocks_without_end_are_not_taken(runtime: Path) -> None:
    """Neither more than phosd can have open, nor for longer than one request may take."""
    mine = files(1)

    def one_more(request: Request) -> Answer:
        (after,) = struct.unpack("<Q", request.payload)
        time.sleep(0.01)
        return Answer(blocks((after + 1, HAS), more=1), mine)

    def taken(most: int) -> list[int]:
        found = []
        for _, descriptor in link.export_blocks(most=most):
            assert descriptor is not None
            found.append(descriptor)
            os.close(descriptor)
        return found

    before = open_files()
    with fake_hook(runtime, one_more), HookLink(os.getpid(), runtime, deadline=0.3) as link:
        with pytest.raises(Timeout, match="did not answer"):
            taken(1000)
        link.connect()
        with pytest.raises(Unsupported, match="more than 3 blocks of device memory"):
            taken(3)
    assert open_files() == before
    os.close(mine[0])
