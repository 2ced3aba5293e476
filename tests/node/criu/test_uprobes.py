"""What uprobes leave in a program: refused by name while it matters, and no obstacle later."""

import ctypes
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.criu.dump.check import check
from phosd.engine.program import tree
from phosd.engine.system import procfs, uprobes
from phosd.errors import Unsupported
from tests.node.criu.life import USER, Life, in_order, wait_for

_PMU = Path("/sys/bus/event_source/devices/uprobe")
pytestmark = pytest.mark.skipif(not _PMU.exists(), reason="this kernel has no uprobes")

TICK = """
#include <unistd.h>
__attribute__((noinline)) int tick(int n) { __asm__ volatile(""); return n + 1; }
int usdt(int n) { __asm__ volatile(".byte 0x0f, 0x1f, 0x44, 0x00, 0x00"); return n; }
int hold(int descriptor) { char one; return read(descriptor, &one, 1); }
"""
COUNTER = """
import ctypes, os, threading, time
library = ctypes.CDLL(os.getcwd() + "/tick.so")
fifo = os.open("fifo", os.O_RDWR)
def holds():
    while True:
        library.hold(fifo)
threading.Thread(target=holds, daemon=True).start()
value = 0
while True:
    value = library.usdt(library.tick(value))
    print(f"{value}\\n", end="", flush=True)
    time.sleep(0.005)
"""
"""Counts by a function, and has another thread in one that waits for bytes in a fifo."""

_PERF_EVENT_OPEN = 298
_ENABLE = 0x2400
_SIZE = 128
_CLOSED = 8


@contextmanager
def probe(library: Path, function: str, pid: int, *, at_return: bool = False) -> Iterator[int]:
    """A probe at a function of the process, until the end of the context; its place in the file."""
    symbols = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    (line,) = [each for each in symbols.splitlines() if each.endswith(f" T {function}")]
    offset = int(line.split()[0], 16)
    name = ctypes.create_string_buffer(bytes(library) + b"\0")
    attributes = bytearray(_SIZE)
    struct.pack_into("<IIQ", attributes, 0, int((_PMU / "type").read_text()), _SIZE, at_return)
    struct.pack_into("<QQ", attributes, 56, ctypes.addressof(name), offset)
    given = (ctypes.c_char * _SIZE).from_buffer(attributes)
    libc = ctypes.CDLL(None, use_errno=True)
    event = libc.syscall(_PERF_EVENT_OPEN, given, pid, -1, -1, _CLOSED)
    assert event >= 0, os.strerror(ctypes.get_errno())
    try:
        fcntl.ioctl(event, _ENABLE)
        yield offset
    finally:
        os.close(event)


@pytest.fixture(params=[0, USER])
def traced(lives: Callable[[int], Life], request: pytest.FixtureRequest) -> Life:
    """A program that counts by a function of a library, of root and of a user."""
    life = lives(request.param)
    library = life.home / "tick.so"
    compiler = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), "-xc", "-"]
    subprocess.run(compiler, input=TICK.encode(), check=True)
    os.mkfifo(life.home / "fifo")
    os.chown(life.home / "fifo", life.uid, life.uid)
    life.start(COUNTER)
    life.counts_on()
    return life


def has_the_mapping(pid: int, name: str = uprobes.AREA) -> bool:
    return any(each.path == name for each in procfs.mappings(pid))


def test_a_breakpoint_is_refused_by_name_and_saved_once_it_is_gone(traced: Life) -> None:
    library = traced.home / "tick.so"
    with probe(library, "tick", traced.pid) as offset:
        traced.counts_on()
        where = rf"python3.* is traced by uprobes at {library}\+{offset:#x} \(end the tracer"
        with pytest.raises(Unsupported, match=where):
            check(traced.criu, tree.scan(traced.pid))
        with pytest.raises(Unsupported, match=where):
            traced.dump()
        assert in_order(traced.counts_on()), "nothing was stopped"
    traced.images.rmdir()
    assert has_the_mapping(traced.pid)
    restored = traced.again()
    assert in_order(traced.counts_on())
    assert not has_the_mapping(restored.pid)
    with probe(library, "tick", restored.pid) as offset:
        assert in_order(traced.counts_on())
        assert uprobes.traces(restored.pid) == [f"{library}+{offset:#x}"], "it is traced anew"
    assert in_order(traced.counts_on())


def test_a_probe_that_became_a_call_is_refused_for_good(traced: Life) -> None:
    """As of Linux 6.18, where an instruction of five bytes does nothing: as at static probes. CRIU
    does not know the mapping; an earlier kernel has a breakpoint there as elsewhere.
    """
    with probe(traced.home / "tick.so", "usdt", traced.pid):
        traced.counts_on(by=20)
        with pytest.raises(Unsupported, match=r"python3.* traced by uprobes "):
            traced.dump()
    traced.images.rmdir()
    if has_the_mapping(traced.pid, uprobes.OPTIMIZED):
        with pytest.raises(Unsupported, match="even when the tracer has ended"):
            traced.dump()
    else:
        traced.again()
    assert in_order(traced.counts_on())


def test_a_function_whose_return_was_traced_has_to_return_first(traced: Life) -> None:
    """The tracer has ended, and the caller's address is not on the stack."""

    def inside() -> bool:
        found = [procfs.system_call(thread) for thread in procfs.threads(traced.pid)]
        return os.uname().machine == "x86_64" and 0 in found  # read(2)

    fifo = os.open(traced.home / "fifo", os.O_WRONLY)
    try:
        wait_for(inside)
        with probe(traced.home / "tick.so", "hold", traced.pid, at_return=True):
            os.write(fifo, b"1")  # the next call is traced
            wait_for(lambda: has_the_mapping(traced.pid) and inside())
        (thread,) = [each for each in procfs.threads(traced.pid) if each != traced.pid]
        with pytest.raises(Unsupported, match=f"the return of a function that thread {thread}"):
            traced.dump()
        os.write(fifo, b"1")
        wait_for(lambda: not uprobes.traces(traced.pid))
        traced.images.rmdir()
        traced.again()
        os.write(fifo, b"1")
        assert in_order(traced.counts_on())
    finally:
        os.close(fifo)
