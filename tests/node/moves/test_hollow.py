"""Hollow programs: only their contexts are on their GPUs, so that they are back sooner."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.evacuate import EvacuationOutcome, GpuCapacity, GpuUser, plan
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.recovery.startup import settle
from phosd.engine.recovery.stranded import stranded
from phosd.errors import Busy, InvalidOption, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, all_compute_right, computes_right
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.node.moves.killed_engine import killed_at
from tests.node.moves.random_moves import gpus_of
from tests.support.harness import Target

HOLLOW = SuspendOptions(hollow=True)
PROGRAMS = ["single", "two_devices", "shared_pair"]


def told(node: Node, target: Target) -> tuple[str, tuple[int, ...], bool]:
    """What `phos ps` tells of a process: its state, its GPUs, and whether it is hollow."""
    (found,) = [each for each in node.processes() if each.pid == target.pid]
    return found.state, found.gpus, found.away is not None and found.away.hollow


def pinned(node: Node) -> Iterator[bool]:
    """Whether each mover has packs of suspended programs mapped, and all of these."""
    packs = node.suspend_store.shelf("memory").disk.packs
    for pid in sorted(node.movers.pids()):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "(deleted)" not in "".join(x for x in maps.splitlines() if str(packs) in x)
        yield f"{packs}/" in maps


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_comes_back_without_the_driver(
    program: str, where: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Again and again, and from what it was before in between."""
    target = start(program)
    target.wait_for_steps(3)
    used = gpus_of(node, target)
    for _ in range(2):
        progress = Progress()
        suspend(node, target.pid, SuspendOptions(where=where, hollow=True), progress)
        assert "control" not in [phase.name for phase in progress.phases]
        assert driver_checkpoint.state(target.pid) is State.RUNNING
        assert told(node, target) == ("suspended", used, True)
        assert not left_parked(node.config.runtime_dir)
        (entry,) = node.suspended.all()
        assert entry.hollow and entry.where == where and entry.stored_bytes
        assert [*pinned(node)] == [where == "memory"] * len(used)
        resume(node, target.pid, ResumeOptions(), Progress())
        assert told(node, target) == ("running", used, False)
        target.more_steps(2)
        assert not node.suspended.all() and not node.suspend_store.shelf(where).list()
        assert not any(pinned(node)), "its memory is free"
        suspend(node, target.pid, SuspendOptions(where=where), Progress())
        resume(node, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)


def test_it_leaves_its_gpu_for_another(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Where its contexts are, it is resumed; once they are off, too, elsewhere."""
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())
    with pytest.raises(
        Unsupported, match=r"contexts of process \d+ are on GPU 0, where alone"
    ) as no:
        resume(node, target.pid, ResumeOptions("1"), Progress())
    assert f"`phos suspend {target.pid}` takes them off" in no.value.hint
    with pytest.raises(Busy, match="is suspended"):
        suspend(node, target.pid, HOLLOW, Progress())
    assert told(node, target) == ("suspended", (0,), True)
    suspend(node, target.pid, SuspendOptions(), Progress())
    assert driver_checkpoint.state(target.pid) is State.CHECKPOINTED
    assert told(node, target) == ("suspended", (), False)
    assert resume(node, target.pid, ResumeOptions("1"), Progress()) == {0: 1}
    computes_right(target, undisturbed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_its_contexts_come_back_first(
    program: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start(program)
    target.wait_for_steps(3)
    used = gpus_of(node, target)
    suspend(node, target.pid, SuspendOptions(), Progress())
    assert told(node, target) == ("suspended", (), False)
    with pytest.raises(InvalidOption, match="hollow on another GPU"):
        resume(node, target.pid, ResumeOptions("1", hollow=True), Progress())
    resume(node, target.pid, ResumeOptions(hollow=True), Progress())
    assert driver_checkpoint.state(target.pid) is State.RUNNING
    assert told(node, target) == ("suspended", used, True)
    assert not left_parked(node.config.runtime_dir)
    with pytest.raises(Busy, match="on its GPUs already"):
        resume(node, target.pid, ResumeOptions(hollow=True), Progress())
    progress = Progress()
    resume(node, target.pid, ResumeOptions(), progress)
    computes_right(target, undisturbed)


def test_what_the_driver_has_whole_has_no_contexts_apart(node: Node, start: Starter) -> None:
    target = start("single", hooked=False)
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    with pytest.raises(Unsupported, match="its memory included"):
        resume(node, target.pid, ResumeOptions(hollow=True), Progress())
    resume(node, target.pid, ResumeOptions(), Progress())
    target.more_steps(2)


def test_who_cannot_leave_stays_hollow(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())

    def fails(_: int) -> None:
        raise Busy("the driver is busy")

    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "checkpoint", fails)
        with pytest.raises(Busy, match="driver is busy"):
            suspend(node, target.pid, SuspendOptions(), Progress())
    assert driver_checkpoint.state(target.pid) is State.RUNNING
    assert told(node, target) == ("suspended", (0,), True)
    resume(node, target.pid, ResumeOptions("0"), Progress())
    computes_right(target, undisturbed)


def test_without_a_hook_there_is_nothing_to_keep_it_still(node: Node, start: Starter) -> None:
    target = start("single", hooked=False)
    target.wait_for_steps(3)
    with pytest.raises(Unsupported, match=r"contexts cannot stay on the GPUs: .*without the hook"):
        suspend(node, target.pid, HOLLOW, Progress())
    target.more_steps(2)


def test_two_take_turns(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    first, second = start("single"), start("features")
    for each in (first, second):
        each.wait_for_steps(3)
    suspend(node, second.pid, HOLLOW, Progress())
    for leaving, coming in ((first, second), (second, first), (first, second)):
        swap(node, leaving.pid, coming.pid, SwapOptions(hollow=True), Progress())
        assert told(node, leaving)[0::2] == ("suspended", True)
        coming.more_steps(2)
    resume(node, first.pid, ResumeOptions(), Progress())
    all_compute_right(undisturbed, first, second)


def test_an_evacuation_takes_it_off(node: Node, start: Starter) -> None:
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())
    (found,) = [each for each in node.processes() if each.pid == target.pid]
    capacities = [GpuCapacity(gpu, "chip", 1 << 34) for gpu in (0, 1)]
    (step,) = plan(0, [GpuUser(found, 1 << 29)], capacities, 0)
    assert (step.outcome, step.why) == (
        EvacuationOutcome.SUSPEND,
        "it is hollow, so its contexts are there",
    )


def test_nobody_takes_it_for_one_that_was_lost(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("shared_pair")
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())
    runtime = node.config.runtime_dir
    assert not [each for each in stranded(runtime) if each.pid in node.suspended.all()[0].pids]
    with pytest.raises(Busy, match="is suspended"):
        bring_back(target.pid, runtime)
    with pytest.raises(Busy, match="is suspended"):
        checkpoint(node, target.pid, CheckpointOptions(), Progress())
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


def test_one_that_is_cancelled_runs_on(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    for phase in ("quiesce", "park"):
        with pytest.raises(Exception, match="cancel"):
            suspend(node, target.pid, HOLLOW, at_phase(phase, Progress.cancel))
        assert not node.suspended.all()
        computes_right(target, undisturbed)


@pytest.mark.parametrize(
    ("action", "points", "still"),
    [
        ("hollow", ("quiesce", "park", "save", "publish", "release"), ()),
        ("sink", ("control", "publish", "release"), ("control", "publish", "release")),
        ("rise", ("control",), ("control",)),
        ("resume", ("load", "control", "map", "open"), ("load",)),
    ],
    ids=["hollow", "sink", "rise", "resume"],
)
def test_the_engine_is_killed(
    action: str,
    points: tuple[str, ...],
    still: tuple[str, ...],
    place: Path,
    start: Starter,
    undisturbed: Undisturbed,
) -> None:
    """At every step. The next one finds it running, or suspended, and then resumes it."""
    module, options = {
        "hollow": ("suspend", "SuspendOptions(hollow=True)"),
        "sink": ("suspend", "SuspendOptions()"),
        "rise": ("resume", "ResumeOptions(hollow=True)"),
        "resume": ("resume", "ResumeOptions()"),
    }[action]
    config = NodeConfig(place / "state", place / "run")
    target = start("shared_pair")
    target.wait_for_steps(3)
    for point in points:
        with Node(config) as node:
            if action != "hollow" and not node.suspended.all():
                suspend(node, target.pid, SuspendOptions(hollow=action != "rise"), Progress())
        killed_at(f"{module}-{point}", module, options, place, target.pid)
        with Node(config) as node:
            settle(node, [])
            asleep = node.suspended.all()
            assert [each.pid for each in asleep] == ([target.pid] if point in still else []), point
            if asleep:
                resume(node, target.pid, ResumeOptions(), Progress())
            assert not left_parked(config.runtime_dir), point
            assert not node.suspend_store.shelf("memory").list()
            computes_right(target, undisturbed)
