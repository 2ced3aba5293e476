"""A program is frozen below the cgroups that its processes are in, and goes back to these."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from phosd.engine.system import cgroups, freezer, procfs
from phosd.engine.system.freezer import (
    KINDS,
    V2,
    Freezer,
    frozen_by_others,
    frozen_for,
    thaw_killed,
)
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, Timeout, Unsupported
from tests.support.harness import alive, wait_until

IMAGE = "20260101T000000-0a0b"
FORKING = """
import os
while True:
    child = os.fork()
    if child: os.waitpid(child, 0)
    elif os.getpid() % 2: os._exit(0)
"""


def hierarchy(kind: str) -> str:
    """The hierarchy of a kind; the test is skipped where it is not mounted."""
    names = [name for name, _ in cgroups.freezable(os.getpid()) if bool(name) == (kind != V2)]
    if not names or cgroups.top(names[0]) is None:
        pytest.skip(f"there is no freezer of {kind} here")
    return names[0]


@contextmanager
def a_cgroup(kind: str) -> Iterator[Path]:
    """A cgroup for processes of the test, which have ended at the end, or left it."""
    top = cgroups.top(hierarchy(kind))
    assert top is not None
    place = top / f"phos-test-{os.getpid()}-{time.monotonic_ns()}"
    place.mkdir()
    yield place
    wait_until(lambda: not (place / "cgroup.procs").read_text(), "the processes' end")
    place.rmdir()


def take(place: Path, pid: int) -> None:
    (place / "cgroup.procs").write_text(str(pid))


def where(pid: int, kind: str) -> Path | None:
    return cgroups.folder(hierarchy(kind), cgroups.memberships(pid)[hierarchy(kind)])


@contextmanager
def a_process(program: str = "import time; time.sleep(600)") -> Iterator[ProcessId]:
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            found = procfs.process_id(process.pid)
            assert found is not None
            yield found
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            thaw_killed([process.pid])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    hierarchy(request.param)
    return str(request.param)


@pytest.fixture
def frozen(tmp_path: Path, kind: str) -> Iterator[Freezer]:
    made = Freezer(tmp_path, [kind])
    yield made
    made.remove_left(lambda _: True)


def test_each_goes_back_to_the_cgroup_that_it_was_in(frozen: Freezer, kind: str) -> None:
    with ExitStack() as stack:
        places = [stack.enter_context(a_cgroup(kind)) for _ in range(2)]
        processes = [stack.enter_context(a_process()) for _ in range(2)]
        pids = [each.pid for each in processes]
        for place, pid in zip(places, pids, strict=True):
            take(place, pid)
        with frozen.made(IMAGE, pids):
            frozen.freeze(IMAGE, processes)
        assert [where(pid, kind) for pid in pids] == [each / f"phos-{IMAGE}" for each in places]
        assert [frozen_for(pid) for pid in pids] == [IMAGE, IMAGE]
        assert frozen.thaw(pids) and not frozen.thaw(pids)
        assert [frozen_for(pid) for pid in pids] == ["", ""]
        frozen.freeze(IMAGE, processes[:1])
        assert frozen_for(pids[1]) == IMAGE, "it belongs to the program"
        frozen.dissolve(IMAGE)
        assert [where(pid, kind) for pid in pids] == places
        assert not list(places[0].glob("phos-*"))
        with frozen.made(IMAGE, pids):
            assert (places[0] / f"phos-{IMAGE}").exists()
        assert not (places[0] / f"phos-{IMAGE}").exists(), "nothing was frozen"


def test_a_forking_program_stands_still(frozen: Freezer, kind: str) -> None:
    with a_process(FORKING) as root:
        frozen.freeze(IMAGE, [root])

        def processes() -> list[int]:
            return sorted(pid for pid in procfs.pids() if _session(pid) == root.pid)

        before = processes()
        time.sleep(0.1)
        assert processes() == before and all(map(frozen_for, before))
        frozen.release([root.pid])
        wait_until(lambda: processes() != before, "it to go on")


def test_what_is_forked_meanwhile_is_frozen_too(
    frozen: Freezer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def late(processes: Collection[ProcessId]) -> Iterator[int]:
        """The first look comes before the fork."""
        looks.append(processes)
        below = list(real(processes))
        return iter(below if len(looks) > 1 else [root.pid])

    real = freezer.with_those_below
    with a_process("import os, time; os.fork(); time.sleep(600)") as root:
        wait_until(lambda: procfs.children(root.pid), "its child")
        monkeypatch.setattr(freezer, "with_those_below", late)
        frozen.freeze(IMAGE, [root])
        assert frozen_for(procfs.children(root.pid)[0]) == IMAGE


def _session(pid: int) -> int:
    found = procfs.stat(pid)
    return 0 if found is None or found.dead else found.session


def test_what_was_killed_ends(frozen: Freezer, kind: str) -> None:
    with a_process() as victim, a_process() as other:
        frozen.freeze(IMAGE, [victim, other])
        os.kill(victim.pid, signal.SIGKILL)

        def gone() -> bool:
            frozen.let_the_killed_end([other.pid])
            return not alive(victim.pid)

        wait_until(gone, "its end")
        assert frozen_for(other.pid) == IMAGE
        frozen.freeze(IMAGE, [victim, other])  # who has ended is no error
        frozen.remove_left({IMAGE}.__contains__)
        assert frozen_for(other.pid) == ""
        frozen.freeze(IMAGE, [other])
        os.kill(other.pid, signal.SIGKILL)
        thaw_killed([other.pid])
        wait_until(lambda: not alive(other.pid), "its end")


def test_what_others_freeze_is_theirs(
    frozen: Freezer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `docker pause` does, before phosd or after it."""
    monkeypatch.setattr(freezer, "_PATIENCE", 0.05)
    with a_cgroup(kind) as place, a_process() as process:
        take(place, process.pid)
        cgroups.set_frozen(place, frozen=True)
        wait_until(lambda: frozen_by_others(process.pid), "it to be frozen")
        with (
            pytest.raises(Busy, match="is frozen, with its cgroup"),
            frozen.made(IMAGE, [process.pid]),
        ):
            pass
        cgroups.set_frozen(place, frozen=False)
        frozen.freeze(IMAGE, [process])
        cgroups.set_frozen(place, frozen=True)
        with pytest.raises(Busy, match="is frozen, with its cgroup"):
            frozen.thaw([process.pid])
        assert frozen_for(process.pid) == IMAGE
        with cgroups.thawed(process.pid):
            assert frozen_for(process.pid) == IMAGE, "who thaws the others' leaves ours"
        cgroups.set_frozen(place, frozen=False)
        frozen.dissolve(IMAGE)


def test_another_phosd_has_its_own(frozen: Freezer, kind: str, tmp_path: Path) -> None:
    """And no user makes one, though the name can be read."""
    other = Freezer(tmp_path / "other", [kind])
    with a_process() as process:
        frozen.freeze(IMAGE, [process])
        other.remove_left(lambda _: True)
        other.dissolve(IMAGE)
        other.release([process.pid])
        assert not other.thaw([process.pid])
        assert frozen_for(process.pid) == IMAGE
        assert frozen.thaw([process.pid])


def test_it_is_refused_where_there_can_be_none(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_cgroup(kind) as place, a_process() as process:
        take(place, process.pid)
        pids = [process.pid]
        with pytest.raises(Unsupported, match="no file system of cgroups"):
            Freezer(tmp_path, []).made(IMAGE, pids).__enter__()

        def read_only(*_: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(os, "setxattr", read_only)
        with pytest.raises(Unsupported, match="Read-only file system") as no:
            Freezer(tmp_path, [kind]).made(IMAGE, pids).__enter__()
        assert "suspend it without `hollow`" in no.value.hint
        assert where(process.pid, kind) == place and not list(place.glob("phos-*"))


def test_below_threads_there_is_none(tmp_path: Path) -> None:
    hierarchy(V2)
    with a_cgroup(V2) as place, a_process() as process:
        inner = place / "threaded"
        inner.mkdir()
        (inner / "cgroup.type").write_text("threaded")
        take(inner, process.pid)
        with pytest.raises(Unsupported, match="domain invalid"):
            Freezer(tmp_path, [V2]).made(IMAGE, [process.pid]).__enter__()
        take(place, process.pid)
        inner.rmdir()


def test_what_does_not_freeze_in_time(
    frozen: Freezer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freezer, "_SECONDS", 0.0)
    monkeypatch.setattr(freezer, "_stands", lambda _: False)
    with a_process() as process:
        with pytest.raises(Timeout, match="do not freeze within"):
            frozen.freeze(IMAGE, [process])
        monkeypatch.undo()
        frozen.dissolve(IMAGE)
        assert not frozen_for(process.pid)
