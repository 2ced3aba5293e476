"""Whatever a client sends, it gets an answer that makes sense, and the daemon goes on."""

import asyncio
import logging
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from dbus_next.signature import SignatureTree
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from phosd.bus import CallError, Connection, Variant, path_of
from phosd.engine.system import procfs
from phosd.interface import methods
from phosd.service.dbus.spec import OBJECT_MANAGER, STANDARD
from tests.support.fake_engine import GPU, manifest, this_process
from tests.support.service import MANAGER, ROOT, Service

INTERFACES = (*methods.INTERFACES, *STANDARD, OBJECT_MANAGER)
METHODS = [
    (interface.name, m.name, m.signature) for interface in INTERFACES for m in interface.methods
]
PATHS = [ROOT, "/", "/org", "/org/phos/job/_1", "/org/phos/image/i", "/org/phos/job/_99", "/x"]
ERROR = re.compile(r"org\.(phos|freedesktop\.DBus)\.Error\.\w+")
PATIENCE = 30.0

RANGES = {"y": 8, "q": 16, "u": 32, "t": 64}
SIGNED = {"n": 16, "i": 32, "x": 64}
TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)
WORDS = st.sampled_from(["i", "auto", "stop", "mode", "token", "every", "../i", "/", "", MANAGER])


def values(signature: str) -> SearchStrategy[Any]:
    """Values of one complete type."""
    kind = signature[0]
    if kind in RANGES:
        return st.integers(0, 2 ** RANGES[kind] - 1)
    if kind in SIGNED:
        bits = SIGNED[kind] - 1
        return st.integers(-(2**bits), 2**bits - 1)
    if kind == "a":
        if signature[1] == "{":
            key, value = split(signature[2:-1])
            return st.dictionaries(values(key), values(value), max_size=4)
        if signature[1] == "y":
            return st.binary(max_size=20)
        return st.lists(values(signature[1:]), max_size=4)
    if kind == "(":
        return st.tuples(*map(values, split(signature[1:-1]))).map(list)
    simple: dict[str, SearchStrategy[Any]] = {
        "b": st.booleans(),
        "d": st.floats(),
        "s": TEXT | WORDS,
        "o": st.sampled_from(PATHS),
        "g": st.sampled_from(["", "s", "a{sv}", "(ii)"]),
        "v": SIGNATURES.flatmap(lambda s: values(s).map(lambda v: Variant(s, v))),
    }
    return simple[kind]


def split(signature: str) -> list[str]:
    """The complete types of a signature."""
    found = []
    while signature:
        length = 1
        while signature[length - 1] == "a":
            length += 1
        if signature[length - 1] in "({":
            depth = 1
            while depth:
                depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(signature[length], 0)
                length += 1
        found.append(signature[:length])
        signature = signature[length:]
    return found


SIGNATURES = st.recursive(
    st.sampled_from("ybnqiuxtdsog"),
    lambda inner: (
        inner.map("a{}".format)
        | st.tuples(st.sampled_from("sqo"), inner).map("a{{{0[0]}{0[1]}}}".format)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({''.join(parts)})")
        | st.just("v")
    ),
    max_leaves=5,
)
ME = procfs.process_id(os.getpid())
HOMES = {
    "org.phos.Job1": "/org/phos/job/_1",
    "org.phos.Image1": "/org/phos/image/i",
    "org.phos.Process1": "/org/phos/process/_{}_{}".format(*(ME or ())),
    "org.phos.Gpu1": path_of("gpu", GPU.uuid),
}
RIGHT = st.sampled_from(METHODS).map(lambda method: (*method, HOMES.get(method[0], ROOT)))
WRONG = RIGHT.flatmap(
    lambda call: st.tuples(
        st.just(call[0]) | st.sampled_from(["org.phos.Nothing1", MANAGER]),
        st.just(call[1]) | st.just("Nonsense"),
        st.just(call[2]) | st.lists(SIGNATURES, max_size=4).map("".join),
        st.sampled_from(PATHS),
    )
)
CALLS = RIGHT | WRONG
MESSAGES = CALLS.flatmap(
    lambda call: st.tuples(st.just(call), st.tuples(*map(values, split(call[2]))))
)


@pytest.fixture
def quiet(service: Service, caplog: pytest.LogCaptureFixture) -> Iterator[Service]:
    """A service with one object of each kind; nothing in it may go wrong."""
    assert ME is not None
    service.engine.running = [this_process(start_time=ME[1])]
    service.engine.stored["i"] = manifest("i")
    service.engine.go.set()
    service.call("ListProcesses")
    service.call("ListImages")
    with caplog.at_level(logging.ERROR):
        yield service
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@contextmanager
def client(service: Service) -> Iterator[tuple[asyncio.AbstractEventLoop, Connection]]:
    loop = asyncio.new_event_loop()
    connection = loop.run_until_complete(Connection.open(service.address))
    yield loop, connection
    connection.close()
    loop.run_until_complete(connection.closed())
    loop.close()


def test_every_call_gets_an_answer_that_makes_sense(quiet: Service) -> None:
    errors: set[str] = set()
    odd_option = {"mood": Variant("s", "good")}
    with client(quiet) as (loop, connection):

        @settings(
            max_examples=500,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(MESSAGES)
        # One for each of the errors that are wanted below.
        @example(((MANAGER, "Nonsense", "", ROOT), ()))
        @example(((MANAGER, "ListJobs", "s", ROOT), ("",)))
        @example((("org.phos.Job1", "Cancel", "a{sv}", "/org/phos/job/_99"), ({},)))
        @example(((MANAGER, "VerifyImage", "sa{sv}", ROOT), ("i", odd_option)))
        def send(message: tuple[tuple[str, str, str, str], tuple[Any, ...]]) -> None:
            (interface, member, signature, path), args = message
            call = connection.call(path, interface, member, signature, *args, patience=PATIENCE)
            try:
                loop.run_until_complete(call)
            except CallError as error:
                errors.add(error.name)
                assert ERROR.fullmatch(error.name), error.name
                assert error.text
                assert "Traceback" not in error.text
                assert not error.name.endswith((".Internal", ".NoReply", ".Disconnected"))

        send()
    wanted = ("UnknownMethod", "InvalidArgs", "UnknownObject", "InvalidOption")
    assert set(wanted) <= {name.rpartition(".")[2] for name in errors}
    assert quiet.call("ListImages").startswith("a(stuttso) ")


class RawClient:
    """Sends bytes that no library would."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(address.removeprefix("unix:path="))
        uid = str(os.getuid()).encode().hex().encode()
        self.socket.sendall(b"\0AUTH EXTERNAL " + uid + b"\r\nBEGIN\r\n")
        assert self.socket.recv(200).startswith(b"OK")
        self.send("org.freedesktop.DBus", "Hello", serial=1, path=None)

    def send(
        self,
        destination: str,
        member: str,
        *,
        serial: int,
        kind: int = 1,
        flags: int = 0,
        fields: Sequence[bytes] = (),
        endian: str = "<",
        path: str | None = ROOT,
    ) -> None:
        """A message without a body; ``fields`` are appended to those of the header."""

        def field(code: int, signature: bytes, text: str) -> bytes:
            head = bytes([code, 1]) + signature + b"\0"
            return head + struct.pack(endian + "I", len(text)) + text.encode() + b"\0"

        known = [field(1, b"o", "/org/freedesktop/DBus" if path is None else path)]
        known += [field(2, b"s", MANAGER)] if kind == 4 else []
        known += [field(3, b"s", member), field(6, b"s", destination)]
        header = b""
        for one in (*known, *fields):
            header = pad(header, 8) + one
        order = b"l" if endian == "<" else b"B"
        start = order + bytes([kind, flags, 1])
        start += struct.pack(endian + "III", 0, serial, len(header))
        self.socket.sendall(pad(start + header, 8))

    def until_answered(self, serial: int) -> None:
        """Wait for an answer of the bus, which throws out who sends what is not allowed."""
        self.send("org.freedesktop.DBus", "GetId", serial=serial, path=None)
        heard = b""
        while not re.search(rb"[0-9a-f]{32}\0", heard):
            data = self.socket.recv(4096)
            assert data, "the bus has thrown out the test"
            heard += data

    def close(self) -> None:
        self.socket.close()


def pad(data: bytes, to: int) -> bytes:
    return data + b"\0" * (-len(data) % to)


@pytest.mark.parametrize(
    "oddity",
    [
        {},
        {"flags": 0xF8},
        {"flags": 0x1},
        {"endian": ">"},
        {"kind": 4},
        {"kind": 9},
        {"fields": [b"\x63\x01s\0" + struct.pack("<I", 3) + b"odd\0"]},
        {"fields": [b"\x64\x01y\0\x07"]},
    ],
    ids=repr,
)
def test_messages_that_are_allowed_and_odd_do_no_harm(
    service: Service, oddity: dict[str, Any]
) -> None:
    """The bus passes them on; a daemon that cannot read one must not lose its connection."""
    before = service.connections[0]._bus
    raw = RawClient(service.address)
    for serial in range(2, 6):
        raw.send("org.phos", "ListJobs", serial=serial, **oddity)
    raw.until_answered(serial=9)
    assert service.call("ListJobs") == "a(ussso) 0"
    raw.close()
    assert service.call("ListJobs") == "a(ussso) 0"
    assert service.connections[0]._bus is before
    assert before.connected


def test_signatures_that_strangers_make_up_are_not_kept(service: Service) -> None:
    """The library remembers each for ever; there are more than memory holds."""
    for number in range(1, 6):
        made_up = f"a{{s({'i' * number}{'s' * number}q)}}"
        with pytest.raises(RuntimeError, match="is no mode"):
            service.call("Checkpoint", "ua{sv}", 1, 1, "mode", made_up, 0)
        with pytest.raises(RuntimeError, match="takes ''"):
            service.call("ListJobs", made_up, 0)
        assert made_up not in SignatureTree._cache
