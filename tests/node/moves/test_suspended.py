"""What happens while a program is suspended: its GPU is taken, phosd ends, and others come."""

from pathlib import Path

import pytest

from phosd.engine import faults
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.startup import settle
from phosd.errors import Busy, Internal, NoSuchImage, OutOfMemory
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, all_compute_right, computes_right
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.node.moves.killed_engine import killed_at
from tests.node.moves.random_moves import gpus_of
from tests.support.gpu_memory import taken
from tests.support.harness import wait_until


def test_its_gpu_is_given_away(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """It stays suspended, and comes later, or elsewhere."""
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    node.movers.mover(0)
    with taken(0):
        with pytest.raises(OutOfMemory, match="GPU 0"):
            resume(node, target.pid, ResumeOptions(), Progress())
        assert [each.pid for each in node.suspended.all()] == [target.pid]
        assert resume(node, target.pid, ResumeOptions("1"), Progress()) == {0: 1}
        target.more_steps(2)
        suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions("0"), Progress())
    computes_right(target, undisturbed)


def test_who_cannot_come_in_a_swap_leaves_the_other_where_it_was(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start("single"), start("features")
    for target in (first, second):
        target.wait_for_steps(3)
    suspend(node, second.pid, SuspendOptions(), Progress())

    def full(*_: object) -> None:
        monkeypatch.undo()
        raise OutOfMemory("GPU 0 is full")

    monkeypatch.setattr("phosd.engine.operations.coming_back.require_device_memory", full)
    with pytest.raises(OutOfMemory, match="is full") as raised:
        swap(node, first.pid, second.pid, SwapOptions(), Progress())
    assert not getattr(raised.value, "__notes__", ())
    assert [each.pid for each in node.suspended.all()] == [second.pid]
    assert gpus_of(node, first) == (0,)
    computes_right(first, undisturbed)
    resume(node, second.pid, ResumeOptions(), Progress())
    computes_right(second, undisturbed)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_next_engine_resumes_it(
    where: str, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    config = NodeConfig(place / "state", place / "run")
    with Node(config) as before:
        target = start("two_devices")
        target.wait_for_steps(3)
        suspend(before, target.pid, SuspendOptions(where=where), Progress())
    with Node(config) as node:
        settle(node, [])
        (listed,) = [p for p in node.processes() if p.pid == target.pid]
        assert listed.state == "suspended"
        resume(node, target.pid, ResumeOptions("0:1,1:0"), Progress())
        computes_right(target, undisturbed)
        migrate(node, target.pid, MigrateOptions("1:0,0:1"), Progress())
        computes_right(target, undisturbed)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_with_another_state_folder_it_waits_for_its_own(
    where: str, place: Path, start: Starter, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    own = NodeConfig(place / "state", place / "run")
    with Node(own) as node:
        target = start("single")
        target.wait_for_steps(3)
        suspend(node, target.pid, SuspendOptions(where=where), Progress())
    with Node(NodeConfig(tmp_path / "state", place / "run")) as other:
        settle(other, [])
        with pytest.raises(NoSuchImage, match="set state_dir back to what it was") as no:
            resume(other, target.pid, ResumeOptions(), Progress())
        assert no.value.what.startswith(f"what process {target.pid} had on its GPUs ")
    with Node(own) as node:
        settle(node, [])
        resume(node, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)


@pytest.mark.parametrize(
    ("points", "action"),
    [
        (("quiesce", "park", "control", "save", "publish", "release"), "suspend"),
        (("load", "control", "map", "open"), "resume"),
    ],
    ids=["suspend", "resume"],
)
def test_the_engine_is_killed(
    points: tuple[str, ...],
    action: str,
    place: Path,
    start: Starter,
    undisturbed: Undisturbed,
) -> None:
    """At every step. The next one finds it running, or suspended, and then resumes it."""
    options = {"suspend": "SuspendOptions()", "resume": 'ResumeOptions("1")'}[action]
    config = NodeConfig(place / "state", place / "run")
    target = start("shared_pair")
    target.wait_for_steps(3)
    for point in points:
        with Node(config) as node:
            if action == "resume" and not node.suspended.all():
                suspend(node, target.pid, SuspendOptions(), Progress())
        killed_at(f"{action}-{point}", action, options, place, target.pid)
        with Node(config) as node:
            settle(node, [])
            asleep = node.suspended.all()
            still = {"suspend": ("release",), "resume": ("load", "control")}[action]
            assert [each.pid for each in asleep] == ([target.pid] if point in still else [])
            if asleep:
                resume(node, target.pid, ResumeOptions("0"), Progress())
            assert not left_parked(config.runtime_dir), point
            assert not node.suspend_store.shelf("memory").list()
            computes_right(target, undisturbed)
            if gpus_of(node, target) == (1,):
                migrate(node, target.pid, MigrateOptions("0"), Progress())


def test_what_fails_keeps_nothing_on_the_gpu(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had is elsewhere, and the next attempt needs the room."""
    target = start("shared_pair")
    target.wait_for_steps(3)
    free, _ = node.movers.mover(0).free_memory()
    for action in ("suspend-release", "resume-control", "resume-map"):
        with monkeypatch.context() as patch:
            patch.setattr(faults, "_armed", faults.parse(action))
            patch.setattr(faults, "_visits", {})
            if action.startswith("suspend"):
                progress = Progress()
                suspend(node, target.pid, SuspendOptions(), progress)
                assert any(action in note for note in progress.notes)
            else:
                with pytest.raises(Internal, match=action):
                    resume(node, target.pid, ResumeOptions(), Progress())
        assert not left_parked(node.config.runtime_dir), action
        assert node.movers.mover(0).free_memory()[0] >= free, action
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


def test_two_jobs_at_once(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """The second is told that there is one; for another program it is done."""
    target, other = start("single"), start("features")
    for each in (target, other):
        each.wait_for_steps(3)
    refused = []

    def meanwhile(_: Progress) -> None:
        for act in (
            lambda: migrate(node, target.pid, MigrateOptions("1"), Progress()),
            lambda: suspend(node, target.pid, SuspendOptions(), Progress()),
        ):
            with pytest.raises(Busy, match=f"another job works on process {target.pid}"):
                act()
            refused.append(act)
        migrate(node, other.pid, MigrateOptions("1"), Progress())

    migrate(node, target.pid, MigrateOptions("1"), at_phase("precopy", meanwhile))
    assert len(refused) == 2
    assert gpus_of(node, target) == gpus_of(node, other) == (1,)
    all_compute_right(undisturbed, target, other)


def test_one_that_ends_while_it_is_suspended(node: Node, start: Starter) -> None:
    """Its record and its bytes go when somebody looks."""
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    target.kill()
    node.suspend_store.forget_the_dead()
    assert not node.suspended.all() and not node.suspend_store.shelf("memory").list()
    packs = node.suspend_store.shelf("memory").disk.packs
    wait_until(lambda: not list(packs.iterdir()), "its bytes to be gone")
