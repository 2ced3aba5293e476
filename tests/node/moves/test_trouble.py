"""Trouble in the middle of a move: the program goes on where it is, or stays suspended."""

from pathlib import Path
from typing import Any

import pytest

from phosd.engine.faults import Point
from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.affected import AffectedSet
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.system import cuda
from phosd.errors import OutOfMemory, PhosError, Timeout
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right, save
from tests.node.checkpoint_restore.test_fault_points import armed
from tests.node.moves.random_moves import gpus_of
from tests.support.harness import Target, children

MIGRATE = [p for p in Point if p.startswith("migrate-")]
SUSPEND = [p for p in Point if p.startswith("suspend-")]
RESUME = [p for p in Point if p.startswith("resume-")]
STEPS = [Point.PARKING_PARK, Point.DRIVER_LOCK, Point.DRIVER_CHECKPOINT]


def move(node: Node, target: Target, to: str, progress: Progress | None = None) -> None:
    migrate(node, target.pid, MigrateOptions(to), progress or Progress())


def runs_at(node: Node, target: Target, gpu: int, undisturbed: Undisturbed) -> None:
    """The target is there and computes right, and what phosd keeps of it is right, too."""
    assert gpus_of(node, target) == (gpu,)
    computes_right(target, undisturbed)
    move(node, target, str(1 - gpu))
    computes_right(target, undisturbed)
    move(node, target, str(gpu))
    computes_right(target, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("program", ["single", "shared_pair"])
def test_every_step_of_a_migration_fails(
    program: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Until the driver has moved it, it is where it was; from then on where it was to go."""
    target = start(program)
    target.wait_for_steps(3)
    visits = (1, 2) if program == "shared_pair" else (1,)
    for step in (*MIGRATE, *STEPS):
        for visit in visits if step in STEPS else (1,):
            with armed(f"{step}:{visit}:raise"), pytest.raises(PhosError, match="fault") as raised:
                move(node, target, "1")
            assert not getattr(raised.value, "__notes__", ()), "what failed could not be undone"
            there = step in (Point.MIGRATE_UNPARK, Point.MIGRATE_RELEASE)
            assert gpus_of(node, target) == ((1,) if there else (0,)), step
            computes_right(target, undisturbed)
            if there:
                move(node, target, "0")
    runs_at(node, target, 0, undisturbed)
    save(node, target, "concurrent")


@pytest.mark.parametrize(("program", "to"), [("single", "1"), ("two_devices", "0:1,1:0")])
def test_the_hook_does_not_take_its_memory(
    program: str,
    to: str,
    place: Path,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is on the other GPU, where the mover keeps it, also where others left it."""

    def silent(*_: object) -> int:
        raise Timeout("the hook says nothing")

    target = start(program)
    target.wait_for_steps(3)
    config = NodeConfig(place / "state", place / "run")
    with Node(config) as node, monkeypatch.context() as patch:
        patch.setattr(HookLink, "unpark", silent)
        with pytest.raises(Timeout, match="says nothing"):
            move(node, target, to)
    assert not bring_back(target.pid, place / "run").failures
    assert not left_parked(place / "run")
    computes_right(target, undisturbed)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_processes_cannot_move(
    which: int,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other comes back, too: together they are right, on either GPU, and apart they are not."""
    target = start("shared_pair")
    target.wait_for_steps(3)
    refused = [target.pid, *children(target.pid)][which]
    asked: list[int] = []
    left: list[bool] = []

    def call(name: str, *arguments: Any, about: str = "") -> Any:
        if name == "cuCheckpointProcessRestore" and arguments[0] == refused and not asked:
            asked.append(refused)
            raise OutOfMemory("the new GPU is full")
        if name == "cuCheckpointProcessCheckpoint" and asked:
            left.append(node.gpu_locks.acquire([1]))
        return cuda.call(name, *arguments, about=about)

    told: list[AffectedSet] = []
    with monkeypatch.context() as patch:
        patch.setattr("phosd.engine.program.driver_checkpoint.call", call)
        with pytest.raises(OutOfMemory, match="is full") as raised:
            move(node, target, "1", Progress(recorder=told.append))
    assert not getattr(raised.value, "__notes__", ())
    assert [affected.moves for affected in told] == [{}, {0: 1}, {}]
    assert left == [False], "the other left the new GPU while no other job could use it"
    runs_at(node, target, 0, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_every_step_of_a_suspension_and_of_a_resumption_fails(
    where: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """It runs until it is suspended, and stays suspended until it runs."""
    target = start("shared_pair")
    target.wait_for_steps(3)
    options = SuspendOptions(where=where)
    for step in (*SUSPEND, *STEPS):
        for visit in (1, 2) if step in STEPS else (1,):
            if step is Point.SUSPEND_RELEASE:
                continue
            with armed(f"{step}:{visit}:raise"), pytest.raises(PhosError, match="fault") as raised:
                suspend(node, target.pid, options, Progress())
            assert not getattr(raised.value, "__notes__", ()), "what failed could not be undone"
            kept = node.suspend_store.shelf(where).list()
            assert len(node.suspended.all()) == len(kept) == 0, step
            computes_right(target, undisturbed)
    progress = Progress()
    with armed(f"{Point.SUSPEND_RELEASE}:raise"):
        suspend(node, target.pid, options, progress)
    assert any("fault" in note for note in progress.notes), "it is suspended, and this is told"
    assert not left_parked(node.config.runtime_dir)
    resume(node, target.pid, ResumeOptions(), Progress())
    save(node, target, "stop")
    computes_right(target, undisturbed)
    suspend(node, target.pid, options, Progress())
    for number, step in enumerate(RESUME):
        to = ResumeOptions(str(number % 2))
        with armed(f"{step}:raise"), pytest.raises(PhosError, match="fault") as raised:
            resume(node, target.pid, to, Progress())
        assert not getattr(raised.value, "__notes__", ()), "what failed could not be undone"
        asleep = step is not Point.RESUME_OPEN
        assert len(node.suspended.all()) == asleep, step
    assert not left_parked(node.config.runtime_dir) and not node.suspend_store.shelf(where).list()
    computes_right(target, undisturbed)
    (gpu,) = gpus_of(node, target)
    runs_at(node, target, gpu, undisturbed)
