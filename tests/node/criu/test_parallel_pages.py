"""Memory that threads put back in CRIU's place: equal, no more of it, and only where it may be."""

import errno
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from phosd.engine import faults
from phosd.engine.criu.images import rseq_areas
from phosd.engine.criu.images.digests import digests
from phosd.engine.criu.restore import parallel_pages
from phosd.engine.criu.restore.clone import Clone, CloneFiles
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.piece_copier import Piece
from phosd.engine.criu.restore.private_copy import remove_left
from phosd.engine.criu.restore.restore import restore_tree
from phosd.engine.criu.restore.restored_processes import RestoredProcesses
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.faults import Kind
from phosd.engine.program import tree
from phosd.engine.system import procfs
from phosd.errors import ImageCorrupt, Internal
from tests.node.criu.life import SYSTEM_PYTHON, USER, Life, in_order, wait_for
from tests.support.harness import alive

ROOT = Path(__file__).parents[3]

SHAPES = """
import ctypes, hashlib, mmap, os, random, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
chance = random.Random(os.getpid())
MIB = 1 << 20
READ, WRITE, PRIVATE, ANONYMOUS = 1, 2, 2, 0x20
areas = []

def made(size, advice=(), kind=PRIVATE | ANONYMOUS, file=-1, holes=False, at=None):
    address = libc.mmap(at, size, READ | WRITE, kind, file, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    for each in advice:
        assert not libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), each), each
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    step = 4 * MIB if size > 4 * MIB else size
    for begin in range(0, size, step):
        if holes and begin // step % 4 == 3:
            continue
        memory[begin : begin + step] = chance.randbytes(step)
    if holes:
        memory[5 * MIB + 12345] = 1
    areas.append(memory)
    return address

def protect(address, size, protection):
    assert not libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection)

HUGE, DONTFORK, DONTDUMP, WIPEONFORK = 14, 10, 16, 18
made(8 * MIB, at=1 << 40)  # apart: neighbours become one mapping, which the child has not
libc.malloc_trim(0)
child = os.fork() == 0
if child:
    areas[-1][MIB : 2 * MIB] = chance.randbytes(MIB)
else:
    made(96 * MIB, holes=True)
    with open("mapped", "wb") as file:
        file.truncate(4 * MIB)
    file = os.open("mapped", os.O_RDONLY)
    made(3 * MIB, kind=PRIVATE, file=file)
    read_only = made(2 * MIB)
    protect(read_only, 2 * MIB, READ)
    half = made(4 * MIB)
    protect(half + MIB, 2 * MIB, READ)
    made(2 * MIB, kind=PRIVATE | ANONYMOUS | 0x100)  # grows down
    made(16 * MIB, [HUGE])
    made(2 * MIB, [DONTFORK, DONTDUMP])
    made(2 * MIB, [WIPEONFORK])
    made(2 * MIB, kind=PRIVATE | ANONYMOUS | 0x2000)  # locked
    hidden = made(2 * MIB)
    protect(hidden, 2 * MIB, 0)

def digest():
    whole = hashlib.sha256()
    if not child:
        protect(hidden, 2 * MIB, READ)
    for memory in areas:
        whole.update(memory)
    if not child:
        protect(hidden, 2 * MIB, 0)
    return whole.digest()

right = digest()
value = 0
while digest() == right and not (child and os.getppid() == 1):
    value += 1
    if not child:
        print(value, flush=True)
os._exit(1)
"""
"""A process and its child, which end when their memory is not what it was."""

LARGE = """
import os, zlib
memory = os.urandom(66 << 20)
right = zlib.crc32(memory)
value = 0
while zlib.crc32(memory) == right:
    value += 1
    print(value, flush=True)
"""


@pytest.fixture
def large(lives: Callable[[int], Life]) -> Iterator[Life]:
    """A user's program with much memory, saved and killed. Nothing is left beside its image."""
    yield from saved(lives(USER))


@pytest.fixture
def large_of_root(lives: Callable[[int], Life]) -> Iterator[Life]:
    """A root program, whose restore needs no private copy of CRIU's files on any machine."""
    yield from saved(lives(0))


def saved(life: Life) -> Iterator[Life]:
    life.start(LARGE)
    life.counts_on(by=2)
    life.dump()
    life.kill()
    yield life
    assert {path.name for path in life.private.iterdir()} == {"images"}
    for path in life.images.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    life.saved_tree.check_listing()


class Mapped(NamedTuple):
    start: int
    end: int
    flags: str
    huge: int
    """Bytes of it in huge pages."""


def mappings(pid: int) -> list[Mapped]:
    """The private mappings of a process."""
    text = (procfs.PROC / str(pid) / "smaps").read_text()
    found = []
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)[1:]:
        first, *rest = part.splitlines()
        range_, permissions, *_ = first.split()
        if not permissions.endswith("p") or "[v" in first:
            continue
        fields = dict(line.split(":", 1) for line in rest)
        # CRIU maps all of them writable first, which the kernel counts for good ("ac").
        flags = " ".join(f for f in fields["VmFlags"].split() if f not in ("sd", "ac"))
        huge = int(fields["AnonHugePages"].split()[0]) << 10
        start, end = (int(each, 16) for each in range_.split("-"))
        found.append(Mapped(start, end, f"{permissions} {flags}", huge))
    return found


def without_hidden(flags: str) -> str:
    """The flags of a mapping, but for whether memory that is not written to may be read: the
    program shows its hidden memory to itself for a moment, perhaps while we look.
    """
    words = flags.split()
    if "wr" in words:
        return flags
    return " ".join(["-", *words[0][1:], *(word for word in words[1:] if word != "rd")])


@pytest.mark.parametrize("uid", [0, USER])
def test_memory_of_all_shapes_is_equal(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    life.start(SHAPES)
    life.counts_on(by=2)
    dumped = life.dump()
    pids = dumped.tree.pids
    before = [mappings(pid) for pid in pids]
    life.kill()
    parents, childs = ({(each.start, each.end) for each in process} for process in before)
    with parallel_pages.parallel_pages(life.saved_tree) as (_, (pages,)):
        assert pages.pid == life.pid
        assert sum(run.length for run in pages.runs) > 64 << 20
        for run in pages.runs:  # CRIU has to find a fork's copies
            assert not any(start <= run.address < end for start, end in parents & childs)
    life.restore()
    assert in_order(life.counts_on(by=2))
    assert tree.scan(life.pid).pids == pids, "a process found its memory changed"
    after = [mappings(pid) for pid in pids]
    for process, now in zip(before, after, strict=True):
        for old in process:  # neighbours may be one mapping now
            (new,) = [each for each in now if each.start <= old.start and old.end <= each.end]
            assert without_hidden(new.flags) == without_hidden(old.flags)
            assert new.huge >= min(old.huge, 8 << 20), "what had huge pages has them"


def test_it_is_as_it_was_in_a_pid_namespace_and_as_a_clone(beside: Life, tmp_path: Path) -> None:
    beside.start(LARGE)
    beside.counts_on(by=2)
    beside.dump()
    clone = Clone(beside.saved_tree, "x", CloneFiles.SHARE)
    options = TreeRestoreOptions(pid_namespace=True, clone=clone)
    restored = restore_tree(beside.criu, beside.saved_tree, options)
    beside.restored.append(restored)
    beside.counts_on(by=4)
    assert procfs.stat(restored.pid) is not None, "a clone found its memory changed"
    restored.abandon()
    beside.kill()
    beside.restored.append(
        restore_tree(beside.criu, beside.saved_tree, TreeRestoreOptions(pid_namespace=True))
    )
    beside.counts_on(by=2)


def arm(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(faults, "_armed", faults.parse(fault))
    monkeypatch.setattr(faults, "_visits", {})


@pytest.mark.parametrize("kind", [Kind.RAISE, Kind.ENOSPC, Kind.SHORT])
def test_a_fault_leaves_nothing(large: Life, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    arm(monkeypatch, f"restore-pages:1:{kind}")
    if kind is Kind.SHORT:
        large.restore()
    else:
        with pytest.raises((Internal, OSError), match="restore-pages"):
            large.restore()
        assert not alive(large.pid)
        large.restore()
    assert in_order(large.counts_on(by=2))


_CHILD = """
import pickle, sys
from phosd.engine.criu.run.program import Criu
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restore import restore_tree
restore_tree(Criu.find(), pickle.load(sys.stdin.buffer), TreeRestoreOptions())
"""


def test_what_a_killed_phosd_leaves_is_found(large: Life) -> None:
    died = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps(large.saved_tree),
        env=os.environ | {"PHOS_FAULT": "restore-pages:1:kill", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    os.kill(large.pid, signal.SIGKILL)  # it is held for ever, until the next phosd ends it
    wait_for(lambda: not alive(large.pid))
    assert len([*large.private.iterdir()]) > 1
    remove_left(large.private, {"images"})
    for path in (large.images, *large.images.rglob("*")):  # as the next phosd does
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.chown(path, 0, 0)
    large.restore()
    assert in_order(large.counts_on(by=2))


def test_a_process_that_is_killed_meanwhile(large: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = parallel_pages.ParallelPageLoader._pieces

    def killed(self: parallel_pages.ParallelPageLoader, ids: dict[int, int]) -> list[Piece]:
        pieces = begun(self, ids)
        os.kill(large.pid, signal.SIGKILL)
        wait_for(lambda: procfs.ending(large.pid) or not alive(large.pid))
        return pieces

    with monkeypatch.context() as patch:
        patch.setattr(parallel_pages.ParallelPageLoader, "_pieces", killed)
        with pytest.raises(Internal, match=r"cannot be put back|ended"):
            large.restore()
    large.restore()
    assert in_order(large.counts_on(by=2))


def test_memory_that_cannot_be_written_is_named(
    large: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the machine's memory is full, or its user has unmapped it."""
    begun = parallel_pages.ParallelPageLoader._pieces

    def elsewhere(self: parallel_pages.ParallelPageLoader, ids: dict[int, int]) -> list[Piece]:
        first, *rest = begun(self, ids)
        return [*rest, first._replace(place=0x1000)]

    monkeypatch.setattr(parallel_pages.ParallelPageLoader, "_pieces", elsewhere)
    with pytest.raises(Internal, match=rf"memory of process {large.pid} .* 0x1000: Input/output"):
        large.restore()
    assert not alive(large.pid)


def test_what_is_written_before_it_is_checked_never_runs(
    large: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = parallel_pages.ParallelPageLoader.made
    before = large.values()
    done = []

    def noting(self: parallel_pages.ParallelPageLoader) -> bool:
        done.append(written(self))
        return done[-1]

    def refused() -> bool:
        if any(done):
            raise ImageCorrupt("a CRIU file is not what was saved", hint="it is damaged")
        return False

    monkeypatch.setattr(parallel_pages.ParallelPageLoader, "made", noting)
    with pytest.raises(ImageCorrupt, match="not what was saved"):
        restore_tree(large.criu, large.saved_tree, TreeRestoreOptions(), complete=refused)
    assert not alive(large.pid)
    assert large.values() == before


@pytest.mark.parametrize(
    ("step", "error"), [("linked_copy", errno.EPERM), ("_Division.apply", errno.ENOSPC)]
)
def test_without_room_or_links_criu_puts_all_back(
    large_of_root: Life, monkeypatch: pytest.MonkeyPatch, step: str, error: int
) -> None:
    def failing(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(f"{parallel_pages.__name__}.{step}", failing)
    monkeypatch.setattr(parallel_pages.ParallelPageLoader, "_pieces", None)
    large_of_root.restore()
    assert in_order(large_of_root.counts_on(by=2))


WITH_AREA = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
area = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(area), mmap.PAGESIZE):
    area[at + 100] = 1
address = ctypes.addressof(ctypes.c_char.from_buffer(area)) + (2 << 20)
assert libc.syscall(334, ctypes.c_void_p(address), 32, 0, 0x53053053) == 0, ctypes.get_errno()
value = 0
while area[at + 100] == 1:
    value += 1
    print(value, flush=True)
"""
"""Tells the kernel of an rseq area in the middle of its memory."""


def test_what_the_kernel_writes_to_is_left_to_criu(
    lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of these areas while CRIU holds the tasks."""
    monkeypatch.setattr(parallel_pages, "_LEAST", 1 << 20)
    monkeypatch.setattr(parallel_pages, "_MOST_KEPT", 0)
    life = lives(USER)
    life.start(WITH_AREA, env=os.environ | {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"})
    life.counts_on(by=2)
    life.dump()
    life.kill()
    (area,) = rseq_areas.areas(life.images)
    with parallel_pages.parallel_pages(life.saved_tree) as (_, (pages,)):
        assert not any(run.address < area.end and area.start < run.end for run in pages.runs)
        assert any(run.end > area.end for run in pages.runs), "what is beside it is not spared"
    life.restore()
    assert in_order(life.counts_on(by=2))


@pytest.mark.parametrize("name", ["pagemap", "mm"])
def test_a_damaged_list_is_refused(large: Life, name: str) -> None:
    path = large.images / f"{name}-{large.pid}.img"
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(ImageCorrupt, match=name):
        restore_tree(large.criu, large.saved_tree, TreeRestoreOptions())
    assert not alive(large.pid)
    path.write_bytes(content)


def test_pages_that_are_missing_are_refused(large: Life) -> None:
    assert large.record is not None
    (path,) = large.images.glob("pages-*.img")
    whole = path.with_name("whole")
    shutil.copyfile(path, whole)
    os.truncate(path, path.stat().st_size - 4096)
    large.record = msgspec.structs.replace(large.record, files=digests(large.images))
    with pytest.raises(ImageCorrupt, match="shorter"):
        restore_tree(large.criu, large.saved_tree, TreeRestoreOptions())
    whole.rename(path)
    path.chmod(0o600)
    large.record = msgspec.structs.replace(large.record, files=digests(large.images))


@pytest.mark.parametrize(
    ("before", "user", "allowed"),
    [
        ("", USER, True),
        ("", 0, False),
        ("", USER + 1, False),
        ("import ctypes; ctypes.CDLL(None).prctl(4, 0); ", USER, False),  # PR_SET_DUMPABLE
    ],
)
def test_memory_that_is_not_the_owners_to_change_is_not_written(
    life: Life, before: str, user: int, allowed: bool
) -> None:
    life.start(LARGE)
    life.counts_on(by=1)
    life.dump()
    life.kill()
    source = before + "print(1, flush=True); input()"
    with subprocess.Popen(
        [SYSTEM_PYTHON, "-c", source],
        user=user,
        group=user,
        extra_groups=[],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        made = RestoredProcesses(life.saved_tree)
        with parallel_pages.ParallelPageLoader((), made, Owner(USER, USER, ()), ()) as pages:
            if allowed:
                pages._memory_of(other.pid)
            else:
                with pytest.raises(Internal, match="other rights"):
                    pages._memory_of(other.pid)
        other.kill()
        other.wait()
        with (
            parallel_pages.ParallelPageLoader((), made, Owner(USER, USER, ()), ()) as pages,
            pytest.raises(Internal, match="cannot be put back"),
        ):
            pages._memory_of(other.pid)
