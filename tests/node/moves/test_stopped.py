"""Programs without the hook whose threads poll the driver are suspended, in a group stop."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.faults import Point
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.engine.program import driver_checkpoint, held
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.recovery.startup import settle
from phosd.engine.recovery.stranded import stranded
from phosd.engine.system import procfs, stopped_state
from phosd.errors import Busy, Cancelled, NoSuchProcess, PhosError, Timeout, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, all_compute_right, computes_right
from tests.node.checkpoint_restore.test_fault_points import armed
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.harness import (
    Target,
    children,
    halt,
    has_two_gpus,
    moved_to,
    parse,
    running,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("unlocked_when_free")
SUSPEND_STEPS = (Point.GROUP_STOP_BEGIN, Point.DRIVER_CHECKPOINT, Point.SUSPEND_PUBLISH)
RESUME_STEPS = (
    Point.RESUME_CONTROL,
    Point.GROUP_STOP_END,
    Point.GROUP_STOP_FORGET,
    Point.RESUME_MAP,
)
ENGINE = """
import sys, pathlib
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
from phosd.engine.operations.resume import *
from phosd.engine.operations.suspend import *
place = pathlib.Path(sys.argv[1])
node = Node(NodeConfig(place / "state", place / "run"))
act, options = (suspend, SuspendOptions) if sys.argv[3] == "suspend" else (resume, ResumeOptions)
act(node, int(sys.argv[2]), options(), Progress())
"""
BOTH = """
import runpy, subprocess, sys
sys.argv.pop(0)
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
subprocess.Popen([sys.executable, *sys.argv], stdout=open("child.log", "ab"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that starts itself once more, below it."""
STARTING = """
import sys, threading, time
def start():
    for line in sys.stdin:
        each = threading.Thread(target=print, args=("one",), kwargs={"flush": True})
        each.start()
        each.join()
for _ in range(3):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
threading.Thread(target=start, name="last").start()
print("started", flush=True)
"""
"""A program whose last thread starts another one for each line that it reads."""


@pytest.fixture
def target(start: Starter) -> Target:
    """A program that polls."""
    started = start("polling", hooked=False)
    started.wait_for_steps(2)
    return started


def states(pid: int) -> set[str]:
    """The states of the threads of a process, as ``/proc`` has them."""
    found = map(procfs.stat, procfs.threads(pid))
    return {thread.state for thread in found if thread is not None}


def asleep(pid: int) -> bool:
    """Whether all threads of a process stop, within a moment: they do when they come to run."""
    return bool(wait_until(lambda: states(pid) == {"T"}, "its threads to stop"))


def listed(node: Node, target: Target) -> tuple[str, str]:
    """How the target is listed: its state, and the reason."""
    (row,) = [each for each in node.processes() if each.pid == target.pid]
    return row.state, row.reason


def free_again(node: Node, target: Target, undisturbed: Undisturbed) -> None:
    """It computes on, and nothing knows it as stopped or suspended."""
    computes_right(target, undisturbed)
    assert not node.suspended.all() and not node.stopped.living()
    assert not procfs.tracer(target.pid) and "T" not in states(target.pid)


def killed_engine(place: Path, target: Target, action: str, fault: str) -> None:
    """An engine of its own suspends or resumes the target, and is killed at a fault point."""
    words = [sys.executable, "-c", ENGINE, str(place), str(target.pid), action]
    log = place / "engine.log"
    with log.open("ab") as said:  # not a pipe, which its movers would keep open
        fault_there = os.environ | {"PHOS_FAULT": f"{fault}:1:kill"}
        done = subprocess.run(words, env=fault_there, stderr=said, timeout=60)
    assert done.returncode == -signal.SIGKILL, log.read_text()


def test_away_and_back(node: Node, target: Target, undisturbed: Undisturbed) -> None:
    suspend(node, target.pid, SuspendOptions(), Progress())
    assert listed(node, target)[0] == "suspended"
    assert asleep(target.pid) and not procfs.tracer(target.pid)
    assert not [each for each in stranded(node.config.runtime_dir) if each.pid == target.pid]
    with pytest.raises(Busy, match="is suspended"):
        bring_back(target.pid, node.config.runtime_dir)
    time.sleep(1)  # pollers would not live as long
    resume(node, target.pid, ResumeOptions(), Progress())
    free_again(node, target, undisturbed)


def test_a_swap_and_another_gpu(
    node: Node, target: Target, start: Starter, undisturbed: Undisturbed
) -> None:
    other = start("polling", hooked=False)
    other.wait_for_steps(2)
    suspend(node, other.pid, SuspendOptions(), Progress())
    swap(node, target.pid, other.pid, SwapOptions(), Progress())
    assert [each.pid for each in node.stopped.living()] == [target.pid]
    other.more_steps(1)
    resume(node, target.pid, ResumeOptions(moved_to(1) if has_two_gpus() else ""), Progress())
    free_again(node, target, undisturbed)
    computes_right(other, undisturbed)


def test_under_the_hook_if_it_cannot_be_parked(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gate is open then. Its hook is stopped, too, and others do not wait for it."""
    target, pair = start("polling"), start("shared_pair")
    for each in (target, pair):
        each.wait_for_steps(2)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointGroup, "why_not_parked", lambda _: Unsupported("a test says so"))
        suspend(node, target.pid, SuspendOptions(), Progress())
    assert listed(node, target)[0] == "suspended" and asleep(target.pid)
    suspend(node, pair.pid, SuspendOptions(), Progress())
    for each in (pair, target):
        resume(node, each.pid, ResumeOptions(), Progress())
    free_again(node, target, undisturbed)
    suspend(node, target.pid, SuspendOptions(), Progress())
    assert not node.stopped.living(), "parked, as its hook holds its calls"
    resume(node, target.pid, ResumeOptions(), Progress())
    all_compute_right(undisturbed, target, pair)


def test_the_engine_ends_meanwhile(place: Path, target: Target, undisturbed: Undisturbed) -> None:
    """Killed: ptrace lets threads go then, a group stop does not."""
    killed_engine(place, target, "suspend", Point.SUSPEND_RELEASE)
    config = NodeConfig(place / "state", place / "run")
    for _ in range(2):
        assert asleep(target.pid)
        with Node(config) as node:
            settle(node, [])
            assert listed(node, target)[0] == "suspended" and asleep(target.pid)
    with Node(config) as node:
        settle(node, [])
        resume(node, target.pid, ResumeOptions(), Progress())
        free_again(node, target, undisturbed)


@pytest.mark.parametrize(
    ("action", "steps"),
    [("suspend", SUSPEND_STEPS), ("resume", RESUME_STEPS)],
    ids=["suspend", "resume"],
)
def test_the_engine_is_killed(
    action: str,
    steps: tuple[Point, ...],
    place: Path,
    target: Target,
    undisturbed: Undisturbed,
) -> None:
    """At every step. The next one finds it running, or suspended, and then resumes it."""
    config = NodeConfig(place / "state", place / "run")
    for step in steps:
        with Node(config) as node:
            if action == "resume":
                suspend(node, target.pid, SuspendOptions(), Progress())
        killed_engine(place, target, action, step)
        with Node(config) as node:
            settle(node, [])
            asleep = [each.pid for each in node.suspended.all()]
            assert asleep == ([target.pid] if step is Point.RESUME_CONTROL else []), step
            if asleep:
                resume(node, target.pid, ResumeOptions(), Progress())
            free_again(node, target, undisturbed)


def test_every_step_fails(node: Node, target: Target, undisturbed: Undisturbed) -> None:
    """It runs until it is suspended, and stays suspended until it runs."""
    for step in (Point.DRIVER_LOCK, *SUSPEND_STEPS):
        with armed(f"{step}:raise"), pytest.raises(PhosError, match="fault point") as raised:
            suspend(node, target.pid, SuspendOptions(), Progress())
        assert not getattr(raised.value, "__notes__", ()), "what failed could not be undone"
        free_again(node, target, undisturbed)
    suspend(node, target.pid, SuspendOptions(), Progress())
    for step in RESUME_STEPS:
        with armed(f"{step}:raise"), pytest.raises(PhosError, match="fault point") as raised:
            resume(node, target.pid, ResumeOptions(), Progress())
        assert not getattr(raised.value, "__notes__", ()), "what failed could not be undone"
        assert [each.pid for each in node.suspended.all()] == [target.pid]
    resume(node, target.pid, ResumeOptions(), Progress())
    free_again(node, target, undisturbed)


def test_it_is_cancelled_and_it_takes_too_long(
    node: Node,
    target: Target,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Cancelled) as raised:
        suspend(node, target.pid, SuspendOptions(), at_phase("control", Progress.cancel))
    assert not getattr(raised.value, "__notes__", ())
    free_again(node, target, undisturbed)
    other = start("single", hooked=False)  # one that does not end if its threads are let go
    other.wait_for_steps(2)
    whole = driver_checkpoint.checkpoint

    def waiting(pid: int) -> None:
        """The driver waits for a lock that a thread has that is held."""
        wait_until(lambda: not {"t", "T"} & states(pid), "its threads to be let go")
        patch.undo()
        whole(pid)

    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "checkpoint", waiting)
        patch.setattr(held, "HOLD_SECONDS", 0.2)
        with pytest.raises(Timeout, match="all its threads were let go"):
            suspend(node, other.pid, SuspendOptions(), Progress())
    free_again(node, other, undisturbed)


@pytest.mark.parametrize("fault", [None, Point.DRIVER_CHECKPOINT])
def test_two_processes(
    fault: Point | None, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("polling", hooked=False, interpreter=(sys.executable, "-c", BOTH))
    child_log = target.log.with_name("child.log")
    wait_until(lambda: child_log.exists() and parse(child_log.read_bytes()), "its child")
    target.wait_for_steps(2)
    (child,) = children(target.pid)
    if fault:
        with armed(f"{fault}:2:raise"), pytest.raises(PhosError, match="fault point") as raised:
            suspend(node, target.pid, SuspendOptions(), Progress())
        assert not getattr(raised.value, "__notes__", ())
    else:
        suspend(node, target.pid, SuspendOptions(), Progress())
        assert {each.pid for each in node.stopped.living()} == {target.pid, child}
        assert asleep(target.pid) and asleep(child)
        resume(node, child, ResumeOptions(), Progress())
    before = parse(child_log.read_bytes())
    wait_until(lambda: len(parse(child_log.read_bytes())) > len(before) + 1, "its child to go on")
    free_again(node, target, undisturbed)
    values = parse(child_log.read_bytes())
    right = undisturbed("polling", steps=max(values) + 1)
    assert values == {step: right[step] for step in values}


def test_its_user_had_stopped_it(node: Node, target: Target, undisturbed: Undisturbed) -> None:
    """Then it is not suspended, and nobody but its user lets it go on."""
    halt(target.pid)
    with pytest.raises(Busy, match="is stopped, by a signal") as raised:
        suspend(node, target.pid, SuspendOptions(), Progress())
    assert f"kill -CONT {target.pid}" in raised.value.hint
    settle(node, [])
    assert states(target.pid) == {"T"}
    os.kill(target.pid, signal.SIGCONT)
    free_again(node, target, undisturbed)


def test_nobody_settles_it(place: Path, target: Target, undisturbed: Undisturbed) -> None:
    """What stands still is told, and `phos recover` brings it back."""
    killed_engine(place, target, "suspend", Point.SUSPEND_PUBLISH)
    runtime = place / "run"
    with Node(NodeConfig(place / "state", runtime)) as node:
        state, reason = listed(node, target)
        assert state == "stopped" and f"process {target.pid} was stopped by phosd" in reason
        with pytest.raises(Busy, match="was stopped by phosd") as raised:
            suspend(node, target.pid, SuspendOptions(), Progress())
        assert raised.value.hint == f"`phos recover {target.pid}`"
        (told,) = [each for each in stranded(runtime) if each.pid == target.pid]
        assert "stopped by phosd" in told.why
        account = bring_back(target.pid, runtime)
        assert not account.failures
        assert "was stopped for a suspension and brought back" in account.text([target.pid])
        free_again(node, target, undisturbed)


def test_it_is_killed_in_its_sleep(node: Node, target: Target) -> None:
    suspend(node, target.pid, SuspendOptions(), Progress())
    folder = node.config.runtime_dir / "stopped"
    (path,) = folder.iterdir()
    assert path.name == f"{target.pid}.json" and path.stat().st_mode & 0o777 == 0o600
    target.kill()
    with pytest.raises(NoSuchProcess, match="is not suspended"):
        resume(node, target.pid, ResumeOptions(), Progress())
    node.processes()
    node.suspend_store.forget_the_dead()
    assert not [*folder.iterdir()] and not node.suspended.all()


@pytest.fixture
def starting() -> Iterator[subprocess.Popen[str]]:
    """A process whose last thread starts others, each of which answers a line."""
    command = [sys.executable, "-c", STARTING]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        # One that is stopped while it has Python's lock keeps the last thread from running.
        wait_until(lambda: states(process.pid) == {"S"}, "its other threads to sleep")
        yield process
        process.kill()


def answers(process: subprocess.Popen[str]) -> bool:
    """Whether a thread that it starts answers."""
    ours, theirs = process.stdin, process.stdout
    assert ours is not None and theirs is not None
    ours.write("start\n")
    ours.flush()
    wait_until(lambda: select.select([theirs.fileno()], [], [], 0)[0], "its answer")
    return theirs.readline() == "one\n"


def test_one_thread_runs_out_of_a_group_stop(
    starting: subprocess.Popen[str], tmp_path: Path
) -> None:
    """With the threads that it starts; at the end of the hold they are all stopped again."""
    stopped, pid = StoppedProcesses(tmp_path), starting.pid
    runs = procfs.threads(pid)[-1]
    with stopped.stopping({pid: runs}):
        assert answers(starting) and answers(starting)
    for _ in range(2):
        assert asleep(pid) and stopped_state.stands_still(pid) and not procfs.tracer(pid)
        with stopped.restore_threads_run([pid]):
            assert answers(starting) and not stopped_state.stands_still(pid)
    assert stopped.let_go([pid]) == [pid] and not stopped.living()
    assert answers(starting) and "T" not in states(pid)
