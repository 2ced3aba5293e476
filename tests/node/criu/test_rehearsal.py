"""Rehearsals of a restore: all is made, nothing runs, and what the original has is as it was."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from phosd.engine import faults
from phosd.engine.criu.images.image_file import Field, changed, rewrite
from phosd.engine.criu.restore.rehearsal import Rehearsal
from phosd.engine.criu.restore.restore import rehearse_tree
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.system import pid_namespaces
from phosd.errors import Cancelled, Internal, OutOfSpace
from tests.node.criu.life import COUNTER, HOLDER, CriuKiller, Life, in_order

KINDS = ("TCP", "UDP", "connection", "@abstract", "path", "flock", "lockf", "fifo", "shm")
DELETED = """
deleted = open("deleted", "w+")
deleted.write("kept")
deleted.flush()
os.remove("deleted")
other = open("other", "w")
other.write("x" * 5000)
other.flush()
os.write(held[-2], b"in the pipe")
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory, which is removed with what is in it."""
    folder = Path("/dev/shm", f"phos-test-rehearsal-{os.getpid()}")
    folder.mkdir(mode=0o700)
    yield folder
    assert {path.name for path in folder.iterdir()} <= {"files"}
    for path in (folder / "files").iterdir():
        path.unlink()
    (folder / "files").rmdir()
    folder.rmdir()


def rehearse(
    life: Life, scratch: Path, cancellation: Cancellation | None = None, *, as_is: bool = False
) -> None:
    rehearsal = Rehearsal(life.saved_tree, scratch, as_is=as_is)
    rehearsal.require_possible()
    rehearse_tree(life.criu, rehearsal, "image", cancellation)


def nothing_stays(life: Life) -> None:
    assert life.criu.runtime_dir is not None
    assert not [*pid_namespaces.living(life.criu.runtime_dir)]
    assert [path.name for path in life.private.iterdir()] == ["images"]


def seen(folder: Path) -> dict[str, object]:
    """What is in a folder, as far as the counter does not change it."""
    found: dict[str, object] = {}
    for path in [folder, *folder.iterdir(), Path("/dev/shm", folder.name)]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        if path.name != "log":
            times = (status.st_mtime_ns, status.st_ctime_ns)
            found[str(path)] = (status.st_ino, status.st_mode, status.st_size, times, content)
    return found


@pytest.mark.parametrize("as_is", [False, True])
def test_files_that_are_larger_by_now(beside: Life, scratch: Path, as_is: bool) -> None:
    data = beside.home / "data"
    data.write_text("before")
    beside.start('data = open("data")\n' + COUNTER)
    beside.counts_on()
    beside.dump()
    data.write_text("larger by now")
    with nullcontext() if as_is else pytest.raises(Internal, match="criu restore failed"):
        rehearse(beside, scratch, as_is=as_is)
    beside.counts_on()


def test_what_the_original_has_is_as_it_was(beside: Life, scratch: Path) -> None:
    beside.start(HOLDER + DELETED + COUNTER, *KINDS)
    beside.counts_on()
    beside.dump()
    before = seen(beside.home)
    assert len(before) > 7
    rehearse(beside, scratch)
    assert seen(beside.home) == before
    assert in_order(beside.counts_on()), "nothing twice: nobody else wrote to its log"
    pipe = os.open(beside.home / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert os.read(pipe, 100) == b"in the pipe"
    os.close(pipe)
    nothing_stays(beside)


@pytest.mark.parametrize("fault", [None, "restore-pages"])
def test_large_memory_is_put_back_too(
    beside: Life, scratch: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """By threads, as at a restore."""
    beside.start("import os\nmemory = os.urandom(80 << 20)\n" + COUNTER)
    beside.counts_on()
    beside.dump()
    if fault is None:
        rehearse(beside, scratch)
    else:
        monkeypatch.setattr(faults, "_armed", faults.parse(fault))
        monkeypatch.setattr(faults, "_visits", {})
        with pytest.raises(Internal, match=fault):
            rehearse(beside, scratch)
    nothing_stays(beside)
    beside.counts_on()


def test_what_would_fail_is_named(beside: Life, scratch: Path) -> None:
    beside.start("read = open('program.py')\n" + COUNTER)
    beside.counts_on()
    beside.dump()
    (beside.home / "program.py").unlink()
    with pytest.raises(Internal, match=r"program\.py.*\(criu restore failed\)") as raised:
        rehearse(beside, scratch)
    first, *others = raised.value.details
    assert raised.value.what.removesuffix(" (criu restore failed)") in first
    assert others and not any(line in str(raised.value) for line in others)
    nothing_stays(beside)
    beside.counts_on()


def test_it_can_be_cancelled(beside: Life, scratch: Path) -> None:
    beside.start(COUNTER)
    beside.counts_on()
    beside.dump()
    cancelled = Cancellation()
    cancelled.cancel()
    with pytest.raises(Cancelled):
        rehearse(beside, scratch, cancelled)
    nothing_stays(beside)


def test_a_size_that_no_file_has_is_refused(beside: Life, scratch: Path) -> None:
    """The program's user may have had CRIU write anything."""
    beside.start("both = open('both', 'w+')\n" + COUNTER)
    beside.counts_on()
    beside.dump()
    path = beside.images / "files.img"

    def larger(entry: list[Field]) -> Iterable[Field]:
        return [
            changed(field, lambda of: [*(f for f in of if f.number != 8), Field.of(8, -1)])
            if field.number == 3 and b"/both" in bytes(field.value)
            else field
            for field in entry
        ]

    rewrite(path, larger)
    assert beside.dumped is not None
    beside.record = beside.dumped.record("images")
    with pytest.raises(OutOfSpace, match="/both"):
        rehearse(beside, scratch)
    nothing_stays(beside)


def test_criu_is_killed_while_it_holds_the_tree(beside: Life, scratch: Path) -> None:
    beside.start(COUNTER)
    beside.counts_on()
    beside.dump()
    killer = CriuKiller()
    with suppress(Internal):  # all may have been made before
        rehearse(beside, scratch, killer)
    assert killer.killed
    nothing_stays(beside)
    beside.counts_on()
