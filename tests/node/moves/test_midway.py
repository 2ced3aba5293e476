"""What happens around a move that is under way: deaths, neighbours, second thoughts, others."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.errors import Cancelled, Internal, NoSuchProcess, OutOfMemory
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, computes_right
from tests.node.checkpoint_restore.test_fault_points import kill
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.node.moves.random_moves import gpus_of
from tests.support.gpu_memory import free, taken
from tests.support.harness import Target, wait_until

Act = Callable[[Node, int, Progress], object]


def go(node: Node, pid: int, progress: Progress) -> None:
    migrate(node, pid, MigrateOptions("1"), progress)


def sleep(node: Node, pid: int, progress: Progress) -> None:
    suspend(node, pid, SuspendOptions("memory"), progress)


def wake(node: Node, pid: int, progress: Progress) -> None:
    resume(node, pid, ResumeOptions("1"), progress)


MIGRATE = ("precopy", "quiesce", "park", "control", "unpark", "release")
SUSPEND = ("quiesce", "park", "control", "save", "publish", "release")
RESUME = ("admission", "load", "control", "map", "release")
PHASES: dict[Act, tuple[str, ...]] = {go: MIGRATE, sleep: SUSPEND, wake: RESUME}
ALL = (*((go, p) for p in MIGRATE), *((sleep, p) for p in SUSPEND), *((wake, p) for p in RESUME))


def at_home(node: Node, target: Target, act: Act) -> None:
    """The target is where the action begins: on GPU 0, or suspended there."""
    if any(target.pid in each.pids for each in node.suspended.all()):
        resume(node, target.pid, ResumeOptions("0"), Progress())
    if gpus_of(node, target) == (1,):
        migrate(node, target.pid, MigrateOptions("0"), Progress())
    if act is wake:
        sleep(node, target.pid, Progress())


def awake(node: Node, target: Target) -> None:
    """The target runs, if need be after a resume."""
    if any(target.pid in each.pids for each in node.suspended.all()):
        resume(node, target.pid, ResumeOptions(), Progress())
    assert not node.suspended.all()


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize(("act", "phase"), ALL, ids=lambda x: getattr(x, "__name__", x))
def test_the_target_is_killed(act: Act, phase: str, node: Node, start: Starter) -> None:
    """The error says so. Nothing is left of it: no memory, no file."""
    before = free(0), free(1)
    target = start("single")
    target.wait_for_steps(3)
    at_home(node, target, act)
    progress = at_phase(phase, lambda _: kill(target.pid))
    if phase == "release":
        act(node, target.pid, progress)  # all is done by then
    else:
        with pytest.raises(NoSuchProcess, match=f"process {target.pid} ((has )?ended|is not)"):
            act(node, target.pid, progress)
    target.process.wait()
    node.suspend_store.forget_the_dead()
    assert not node.suspended.all() and not node.suspend_store.shelf("memory").list()

    def all_free() -> bool:
        node.processes()  # lets go of what is kept of the dead
        node.movers.leave((0, 1), ())
        return free(0) >= before[0] and free(1) >= before[1]

    wait_until(all_free, "its memory to be free")


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize(("act", "gpu"), [(go, 0), (go, 1), (sleep, 0), (wake, 1)])
def test_the_mover_is_killed(
    act: Act, gpu: int, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """In every phase, that of the old GPU and that of the new one: then it is where it was."""
    target = start("single")
    target.wait_for_steps(3)
    for phase in PHASES[act]:
        at_home(node, target, act)
        mover = node.movers.mover(gpu)
        try:
            act(node, target.pid, at_phase(phase, lambda _: kill(mover.pid)))  # noqa: B023
        except Internal as error:
            assert "data mover" in str(error), phase
        wait_until(lambda: not mover.alive, "the last of its threads to end")  # noqa: B023
        awake(node, target)
        computes_right(target, undisturbed)


@pytest.mark.parametrize("act", [go, sleep, wake])
def test_a_second_thought(act: Act, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Cancelled, it is where it was; or it is done already."""
    target = start("single")
    target.wait_for_steps(3)
    cancelled = set()
    for phase in PHASES[act]:
        at_home(node, target, act)
        before = gpus_of(node, target)
        try:
            act(node, target.pid, at_phase(phase, Progress.cancel))
        except Cancelled:
            cancelled.add(phase)
            assert gpus_of(node, target) == before
        awake(node, target)
        computes_right(target, undisturbed)
    assert cancelled >= ({"load"} if act is wake else {"quiesce"} if act is sleep else {"precopy"})


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("program", ["single", "features"])
@pytest.mark.parametrize("act", [go, wake])
def test_a_neighbour_takes_all_memory(
    program: str,
    act: Act,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the check and the use, of both GPUs: it arrives, or is where it was, and runs."""
    for module in ("migrate", "move_checks", "resume", "suspend"):
        monkeypatch.setattr(
            f"phosd.engine.operations.{module}.context_bytes", lambda: 32 << 20, raising=False
        )
    target = start(program)
    target.wait_for_steps(3)
    for phase in (MIGRATE if act is go else RESUME)[:-1]:
        at_home(node, target, act)
        node.movers.mover(0), node.movers.mover(1)
        neighbours: list[object] = []
        with ExitStack() as stack:

            def take(_: Progress) -> None:
                stack.enter_context(taken())
                neighbours.append(None)  # noqa: B023

            try:
                act(node, target.pid, at_phase(phase, take))
            except OutOfMemory:
                assert phase in ("precopy", "admission", "load", "quiesce"), phase
                if act is go:
                    target.more_steps(AFTER)
            assert neighbours
        awake(node, target)
        computes_right(target, undisturbed)
