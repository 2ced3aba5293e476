"""A program is restored in the cgroup in which it was, with its limits."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.criu.run import cgroup_place
from phosd.engine.criu.run.cgroup_place import Surroundings
from phosd.engine.image.cpu_manifest import Cgroups
from phosd.engine.program import tree
from phosd.engine.system import cgroups, procfs
from phosd.engine.system.slurm_steps import step_of
from phosd.errors import Busy, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, wait_for
from tests.support.harness import running

LIMIT = 4 << 30


def hierarchy(controller: str) -> str:
    """The hierarchy that has a controller: one of v1, or the unified one."""
    names = cgroups.memberships(os.getpid())
    return next((name for name in names if controller in name.split(",")), cgroups.UNIFIED)


class Limited:
    """A cgroup whose memory is limited, at the top: below others v2 may have no controllers."""

    def __init__(self) -> None:
        self.hierarchy = hierarchy("memory")
        self.path = f"/phos-test-{os.getpid()}-{time.monotonic_ns()}"
        folder = cgroups.folder(self.hierarchy, self.path)
        assert folder is not None
        self.folder = folder
        self.make()

    def make(self) -> None:
        self.folder.mkdir()
        file = "memory.limit_in_bytes" if self.hierarchy else "memory.max"
        (self.folder / file).write_text(str(LIMIT))

    @property
    def _members(self) -> Path:
        return self.folder / "cgroup.procs"

    def take(self, pid: int) -> None:
        """Move a process into it."""
        self._members.write_text(str(pid))

    def remove(self) -> None:
        """End what is in it, and remove it as soon as the kernel has noticed that."""

        def gone() -> bool:
            for pid in self._members.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            return not self.folder.is_dir()

        if self.folder.is_dir():
            wait_for(gone)


@pytest.fixture
def limited() -> Iterator[Limited]:
    made = Limited()
    yield made
    made.remove()


@pytest.fixture
def life(lives: Callable[[int], Life], limited: Limited) -> Life:
    """A user's program in that cgroup."""
    made = lives(USER)
    made.start(COUNTER)
    limited.take(made.pid)
    made.counts_on()
    return made


def test_it_comes_back_where_it_was(life: Life, limited: Limited) -> None:
    before = cgroups.memberships(life.pid)
    assert before[limited.hierarchy] == limited.path
    assert cgroups.limits(before)["memory.max"] == str(LIMIT)
    life.again()
    life.counts_on()
    assert cgroups.memberships(life.pid) == before


def test_without_its_limits_it_is_not_restored(life: Life, limited: Limited) -> None:
    life.dump()
    life.kill()
    limited.remove()
    with pytest.raises(Unsupported, match=rf"memory.max={LIMIT}\), which no longer exists"):
        life.restore()
    limited.make()
    life.restore()
    life.counts_on()
    assert cgroups.memberships(life.pid)[limited.hierarchy] == limited.path


def test_a_step_with_the_same_number_is_anothers(lives: Callable[[int], Life]) -> None:
    """Slurm gives numbers again. The program stays out of what may be another user's job by now."""
    below = "-slurmstepd.scope/job_7/step_0"
    step = cgroups.folder(hierarchy("freezer"), f"/phos-test-{os.getpid()}{below}")
    assert step is not None
    step.mkdir(parents=True)
    life = lives(USER)
    life.start(COUNTER)
    (step / "cgroup.procs").write_text(str(life.pid))
    try:
        assert str(step_of(life.pid)) == "7.0"
        life.counts_on()
        saved = cgroup_place.noted(tree.scan(life.pid))
        here = Surroundings(cgroups.memberships(os.getpid()))
        assert step / "cgroup.procs" in cgroup_place.place_of(saved, USER, here).entries
        life.dump()
        life.kill()
        wait_for(lambda: not (step / "cgroup.procs").read_text())
        step.rmdir()
        step.mkdir()
        life.restore()
        life.counts_on()
        assert step_of(life.pid) is None
    finally:
        life.kill()
        wait_for(lambda: not (step / "cgroup.procs").read_text())
        for folder in (step, *step.parents[:2]):
            folder.rmdir()


def test_a_limit_that_holds_anyway_is_not_lost(life: Life, limited: Limited) -> None:
    """As that of the container in which both are."""
    paths = cgroups.memberships(life.pid)
    gone = paths | {limited.hierarchy: limited.path + "/gone"}
    saved = Cgroups(gone, {"memory.max": str(LIMIT)})
    cgroup_place.place_of(saved, USER, Surroundings(paths))
    limits = cgroups.limits(cgroups.memberships(os.getpid()))
    assert limits.get("memory.max") != str(LIMIT)
    with pytest.raises(Unsupported, match="no longer exists"):
        cgroup_place.place_of(saved, USER, Surroundings(cgroups.memberships(os.getpid())))


def test_systemd_makes_a_scope_with_the_same_limits(life: Life, limited: Limited) -> None:
    saved = cgroup_place.noted(tree.scan(life.pid))
    outside = Surroundings(None, scopes=True)
    assert cgroup_place.place_of(saved, USER, outside).entries
    missing = Cgroups(saved.paths | {limited.hierarchy: limited.path + "-gone"}, saved.limits)
    place = cgroup_place.place_of(missing, USER, outside)
    assert not place.entries
    assert f"MemoryMax={LIMIT}" in place.properties


def test_a_cgroup_that_cannot_be_entered(
    life: Life, limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where the file system of cgroups is read-only."""
    life.dump()
    life.kill()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        with pytest.raises(Unsupported, match="which cannot be entered from here"):
            life.restore()
    life.restore()
    life.counts_on()


def test_a_process_with_limits_of_its_own(lives: Callable[[int], Life], limited: Limited) -> None:
    life = lives(USER)
    life.start("import subprocess\nsubprocess.Popen(['/bin/sleep', '1000'])\n" + COUNTER)
    life.counts_on()
    (child,) = procfs.children(life.pid)
    limited.take(child)
    with pytest.raises(Unsupported, match=r"sleep 1000.* has other limits than its root"):
        life.dump()
    life.counts_on()
    assert not list(life.images.iterdir())


def test_a_frozen_cgroup() -> None:
    """Nobody could end what is restored into it."""
    with frozen_cgroup() as (name, path, folder):
        saved = Cgroups({name: path}, {})
        with pytest.raises(Busy, match="which is frozen"):
            cgroup_place.place_of(saved, USER, Surroundings({}))
    folder.mkdir()
    assert cgroup_place.place_of(saved, USER, Surroundings({})).entries == (
        folder / "cgroup.procs",
    )
    folder.rmdir()


def test_thawed_for_a_moment() -> None:
    """And frozen again, unless it is another one, above it, that is frozen."""
    with frozen_cgroup() as (name, path, folder), running(["sleep", "1000"]) as sleeper:
        (folder / "cgroup.procs").write_text(str(sleeper.pid))
        with cgroups.thawed(sleeper.pid):
            assert not cgroups.frozen(name, path)
        assert cgroups.frozen(name, path)
        (below := folder / "below").mkdir()
        (below / "cgroup.procs").write_text(str(sleeper.pid))
        wait_for(lambda: [*cgroups.freezers(sleeper.pid)] == [(name, f"{path}/below")])
        with cgroups.thawed(sleeper.pid):
            assert cgroups.frozen(name, f"{path}/below")
        sleeper.kill()
        (folder / ("freezer.state" if name else "cgroup.freeze")).write_text(
            "THAWED" if name else "0"
        )
        sleeper.wait()
        with cgroups.thawed(sleeper.pid):
            pass  # it has ended
        wait_for(lambda: not (below / "cgroup.procs").read_text())
        below.rmdir()


@contextmanager
def frozen_cgroup() -> Iterator[tuple[str, str, Path]]:
    """A frozen cgroup: its hierarchy, path and folder. It is removed at the end."""
    name = hierarchy("freezer")
    path = f"/phos-test-frozen-{time.monotonic_ns()}"
    folder = cgroups.folder(name, path)
    assert folder is not None
    folder.mkdir()
    switch = folder / ("freezer.state" if name else "cgroup.freeze")
    try:
        switch.write_text("FROZEN" if name else "1")
        wait_for(lambda: cgroups.frozen(name, path))
        yield name, path, folder
    finally:
        switch.write_text("THAWED" if name else "0")
        folder.rmdir()


MOUNTS = """\
30 20 0:26 / {0} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
31 20 0:27 /docker/c1 {1} rw - cgroup cgroup rw,cpu,cpuacct
32 20 0:28 / {2} rw - cgroup cgroup rw,xattr,name=systemd
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a file of a machine whose hierarchies are folders here."""
    (tmp_path / "self").mkdir()
    places = [tmp_path / name for name in ("unified", "cpu", "systemd")]
    (tmp_path / "self/mountinfo").write_text(MOUNTS.format(*places))
    monkeypatch.setattr(procfs, "PROC", tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")

    return write


def test_the_tightest_limit_of_all_above_counts(written: Callable[[str, str], None]) -> None:
    written("7/cgroup", "0::/a.slice/b.scope")
    written("unified/cpuset.cpus.effective", "0-7")
    for name, value in {
        "a.slice/memory.max": "1000",
        "a.slice/b.scope/memory.max": "max",
        "a.slice/memory.high": "max",
        "a.slice/pids.max": "50",
        "a.slice/b.scope/pids.max": "60",
        "a.slice/cpu.max": "300000 100000",
        "a.slice/b.scope/cpu.max": "50000 20000",
        "a.slice/b.scope/cpuset.cpus.effective": "0-3",
    }.items():
        written(f"unified/{name}", value)
    assert cgroups.limits(cgroups.memberships(7)) == {
        "memory.max": "1000",
        "pids.max": "50",
        "cpu.max": "50000 20000",
        "cpuset.cpus": "0-3",
    }


def test_the_first_version_in_a_container(
    written: Callable[[str, str], None], tmp_path: Path
) -> None:
    written("7/cgroup", "3:cpuacct,cpu:/docker/c1/in\n2:name=systemd:/../up\n0::/")
    written("cpu/in/cpu.cfs_quota_us", "-1")
    written("cpu/cpu.cfs_quota_us", "150000")
    written("cpu/cpu.cfs_period_us", "100000")
    paths = cgroups.memberships(7)
    assert cgroups.limits(paths) == {"cpu.max": "150000 100000"}
    places = {name: cgroups.folder(name, path) for name, path in paths.items()}
    assert places == {
        "cpuacct,cpu": tmp_path / "cpu/in",
        "name=systemd": None,
        "": tmp_path / "unified",
    }
    assert cgroups.memberships(8) == {}


IN_A_NAMESPACE = (
    """
import os, sys
if "in" not in sys.argv:
    command = ["unshare", "--cgroup", "--", sys.executable, *sys.argv, "in"]
    os.execv("/usr/bin/unshare", command)
"""
    + COUNTER
)


def test_a_namespace_of_its_own_would_be_lost(lives: Callable[[int], Life]) -> None:
    life = lives(0)
    life.start(IN_A_NAMESPACE)
    life.counts_on()
    with pytest.raises(Unsupported, match="its own cgroup namespace"):
        life.dump()
    life.counts_on()
