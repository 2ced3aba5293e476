"""A hollow program is frozen as a whole, and goes on as if it had not been."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node import inspection
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.run_again import Return
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.recovery.startup import settle
from phosd.engine.recovery.stranded import stranded
from phosd.engine.system import cgroups, freezer, procfs, stopped_state
from phosd.engine.system.freezer import KINDS, V1, frozen_for
from phosd.errors import Busy, PhosError, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.node.processes.test_freezer import a_cgroup, hierarchy, take, where
from tests.support import harness
from tests.support.harness import Target, alive, wait_until

HOLLOW = SuspendOptions(hollow=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    hierarchy(request.param)
    return str(request.param)


@pytest.fixture
def frozen_node(place: Path, kind: str) -> Iterator[Node]:
    config = NodeConfig(place / "state", place / "run", freezers=(kind,))
    with Node(config) as made:
        yield made


def counts(place: Path) -> bytes:
    """What the threads of ``busy`` and the children of its child have counted up to."""
    return (place / "counts").read_bytes()


def stands(place: Path) -> bool:
    before = counts(place)
    time.sleep(0.1)
    return counts(place) == before


def goes_on(place: Path, *numbers: int) -> None:
    """These go on to count, or both."""
    before = counts(place)

    def counted(number: int) -> bool:
        place_of = slice(8 * number, 8 * number + 8)
        return counts(place)[place_of] != before[place_of]

    wait_until(lambda: all(map(counted, numbers or (0, 1))), "it to count")


def test_its_threads_stand_still(
    frozen_node: Node,
    place: Path,
    kind: str,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them, in its own cgroups or above them: until a resumption needs them, and again if
    that fails. What is wholly suspended is not frozen.
    """
    node = frozen_node
    monkeypatch.setattr(freezer, "_PATIENCE", 0.05)
    with ExitStack() as places:
        homes = [places.enter_context(a_cgroup(kind)) for _ in range(2)]
        target = start("busy")
        target.wait_for_steps(3)
        (child, *_) = harness.children(target.pid)
        pids = (target.pid, child)
        for home, pid in zip(homes, pids, strict=True):
            take(home, pid)
        suspend(node, target.pid, HOLLOW, Progress())
        (entry,) = node.suspended.all()
        assert [where(pid, kind) for pid in pids] == [
            each / f"phos-{entry.image}" for each in homes
        ]
        assert stands(place)
        nobody_asks(node, target)

        cgroups.set_frozen(homes[0], frozen=True)  # as `docker pause` does
        with pytest.raises(Busy, match="is frozen, with its cgroup"):
            resume(node, target.pid, ResumeOptions(), Progress())
        cgroups.set_frozen(homes[0], frozen=False)

        with monkeypatch.context() as patch:
            patch.setattr(Return, "connect", _fails_once_it_goes_on(place))
            with pytest.raises(Busy, match="the driver is busy"):
                resume(node, target.pid, ResumeOptions(), Progress())
        assert stands(place) and node.suspended.all() == [entry]

        suspend(node, target.pid, SuspendOptions(), Progress())
        assert [where(pid, kind) for pid in pids] == homes
        goes_on(place)
        resume(node, target.pid, ResumeOptions(hollow=True), Progress())
        assert stands(place) and {*map(frozen_for, pids)} == {entry.image}
        resume(node, target.pid, ResumeOptions(), Progress())
        assert [where(pid, kind) for pid in pids] == homes
        assert not [*homes[0].glob("phos-*"), *homes[1].glob("phos-*")]
        goes_on(place)
        computes_right(target, undisturbed)
        target.kill()


def _fails_once_it_goes_on(place: Path) -> Callable[..., None]:
    def fails(*_: object) -> None:
        goes_on(place, 0)  # no GPU process is in the other cgroup
        raise Busy("the driver is busy")

    return fails


def nobody_asks(node: Node, target: Target) -> None:
    """Neither lists nor those that are refused wait for a frozen program."""
    began = time.monotonic()
    (found,) = [each for each in node.processes() if each.pid == target.pid]
    assert (found.state, found.gpus) == ("suspended", (0,)) and found.away and found.away.hollow
    runtime = node.config.runtime_dir
    assert not [each for each in stranded(runtime) if each.pid == target.pid]
    for ask in (
        lambda: inspection.kernels(node, found.id),
        lambda: inspection.blocks(node, found.id),
        lambda: checkpoint(node, target.pid, CheckpointOptions(), Progress()),
        lambda: migrate(node, target.pid, MigrateOptions("1"), Progress()),
        lambda: suspend(node, target.pid, HOLLOW, Progress()),
        lambda: bring_back(target.pid, runtime),
    ):
        with pytest.raises(Busy, match="is suspended"):
            ask()
    assert time.monotonic() - began < 1.5, "somebody waited for an answer"


def test_it_may_be_killed(frozen_node: Node, place: Path, kind: str, start: Starter) -> None:
    """Then nothing is left of it: neither its data nor its cgroup, nor what it had forked."""
    node = frozen_node
    target = start("busy")
    target.wait_for_steps(1)
    (child, *_) = harness.children(target.pid)
    suspend(node, target.pid, HOLLOW, Progress())
    (entry,) = node.suspended.all()
    os.kill(target.pid, signal.SIGKILL)

    def forgotten() -> bool:
        target.process.poll()
        node.suspend_store.forget_the_dead()
        return not node.suspended.all()

    wait_until(forgotten, "the entry to go")
    assert target.process.wait() == -signal.SIGKILL
    wait_until(lambda: not alive(child), "its child to see that")
    top = cgroups.top(hierarchy(kind))
    assert top is not None and not (top / f"phos-{entry.image}").exists()
    assert not node.suspend_store.shelf(entry.where).list()


def test_it_is_refused_where_no_cgroup_can_be_made(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Before anything is touched: as in most containers their file system is read-only."""
    target = start("single")
    target.wait_for_steps(3)
    tops = [cgroups.top(name) for name, _ in cgroups.freezable(os.getpid())]
    closed = " && ".join(f"mount -o remount,bind,ro {top}" for top in tops if top)
    program = (
        f"{_PROGRAM}\nsuspend(node, int(sys.argv[2]), SuspendOptions(hollow=True), Progress())"
    )
    runtime = node.config.runtime_dir.parent
    words = ["unshare", "-m", "sh", "-c", f'{closed} && exec "$@"', "sh", sys.executable, "-c"]
    log = runtime / "engine.log"
    with log.open("ab") as said:  # not a pipe, which its movers would keep open
        done = subprocess.run(
            [*words, program, str(runtime), str(target.pid), "v1,v2"], stderr=said, timeout=60
        )
    told = log.read_text()
    assert done.returncode == 1 and "Unsupported" in told, told
    assert "cannot be frozen" in told and "Read-only file system" in told
    with Node(NodeConfig(runtime / "state", runtime / "run", freezers=())) as without:
        progress = Progress()
        with pytest.raises(Unsupported, match="no file system of cgroups"):
            suspend(without, target.pid, HOLLOW, progress)
        assert [phase.name for phase in progress.phases] == ["prepare"]
        suspend(without, target.pid, SuspendOptions(), Progress())
        with pytest.raises(Unsupported, match="no file system of cgroups"):
            resume(without, target.pid, ResumeOptions(hollow=True), Progress())
        resume(without, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


_PROGRAM = """
import sys, pathlib
from phosd.engine.operations.suspend import *
from phosd.engine.operations.resume import *
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
place = pathlib.Path(sys.argv[1])
node = Node(NodeConfig(place / "state", place / "run", freezers=sys.argv[3].split(",")))
"""
_ACTIONS = {
    "hollow": "suspend(node, int(sys.argv[2]), SuspendOptions(hollow=True), Progress())",
    "sink": "suspend(node, int(sys.argv[2]), SuspendOptions(), Progress())",
    "rise": "resume(node, int(sys.argv[2]), ResumeOptions(hollow=True), Progress())",
    "resume": "resume(node, int(sys.argv[2]), ResumeOptions(), Progress())",
}


def test_the_engine_is_killed(place: Path, start: Starter, undisturbed: Undisturbed) -> None:
    """At every step of freezing and thawing. The next one finds it running, suspended, or hollow
    and frozen; both freezers in turn, with the same outcome.
    """
    target = start("single")
    target.wait_for_steps(3)
    kinds = [each for each in KINDS if cgroups.top("" if each != V1 else "freezer")]
    for turn, (action, point, after) in enumerate(
        [
            ("hollow", "moved", "runs"),
            ("hollow", "end", "runs"),
            ("sink", "thawed", "hollow"),
            ("sink", "leave", "suspended"),
            ("rise", "begin", "suspended"),
            ("rise", "moved", "suspended"),
            ("rise", "end", "hollow"),
            ("resume", "thawed", "runs"),
            ("resume", "leave", "runs"),
        ]
    ):
        config = NodeConfig(place / "state", place / "run", freezers=(kinds[turn % len(kinds)],))
        with Node(config) as node:
            if action != "hollow":
                suspend(node, target.pid, SuspendOptions(hollow=action != "rise"), Progress())
        fault = os.environ | {"PHOS_FAULT": f"freeze-{point}:1:kill"}
        words = [sys.executable, "-c", _PROGRAM + _ACTIONS[action], str(place), str(target.pid)]
        log = place / "engine.log"
        with log.open("ab") as said:
            done = subprocess.run([*words, *config.freezers], env=fault, stderr=said, timeout=60)
        assert done.returncode == -signal.SIGKILL, log.read_text()
        with Node(config) as node:
            settle(node, [])
            assert _what_became_of(node, target) == after, (action, point)
            if after != "runs":
                resume(node, target.pid, ResumeOptions(), Progress())
            assert not any(map(cgroups.is_own, cgroups.memberships(target.pid).values()))
            target.more_steps(1)
    computes_right(target, undisturbed)


def _what_became_of(node: Node, target: Target) -> str:
    frozen, entries = frozen_for(target.pid), node.suspended.all()
    if not entries:
        return f"runs{frozen}"
    assert frozen == (entries[0].image if entries[0].hollow else "")
    return "hollow" if frozen else "suspended"


def test_who_is_left_frozen_is_recovered(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `phos recover`, also while no phosd has run since it was killed."""
    monkeypatch.setattr(stopped_state, "TIMEOUT", 0.1)
    target = start("single")
    target.wait_for_steps(3)
    process = procfs.process_id(target.pid)
    assert process is not None
    node.freezer.freeze("20260101T000000-0a0b", [process])
    (found,) = [each for each in stranded(node.config.runtime_dir) if each.pid == target.pid]
    assert found.why == "frozen by phosd for a job that did not end"
    with pytest.raises(PhosError, match="is frozen by phosd"):
        checkpoint(node, target.pid, CheckpointOptions(), Progress())
    bring_back(target.pid, node.config.runtime_dir)
    computes_right(target, undisturbed)
