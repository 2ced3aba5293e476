"""Programs without the hook whose threads poll the driver are moved: phosd holds the threads."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from phosd.engine.faults import Point
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.program import driver_checkpoint
from phosd.engine.program import held as held_threads
from phosd.engine.program.held import held
from phosd.engine.system import procfs, ptrace, stopped_state
from phosd.errors import Busy, PhosError, Timeout
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.node.checkpoint_restore.test_fault_points import armed
from tests.support.harness import moved_to, running, wait_until

pytestmark = pytest.mark.usefixtures("unlocked_when_free")
THREADS = """
import threading, time
def count(path):
    number = 0
    while True:
        number += 1
        path[0] = number
paths = [[0] for _ in range(4)]
for path in paths:
    threading.Thread(target=count, args=(path,), daemon=True).start()
while True:
    print(sum(path[0] for path in paths), flush=True)
    time.sleep(0.01)
"""


@pytest.mark.usefixtures("two_gpus")
def test_there_and_back(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling", hooked=False)
    target.wait_for_steps(2)
    for gpu in (1, 0, 1):
        migrate(node, target.pid, MigrateOptions(moved_to(gpu)), Progress())
        target.more_steps(1)
    assert not procfs.tracer(target.pid)
    computes_right(target, undisturbed)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("step", [Point.DRIVER_CHECKPOINT, Point.MIGRATE_MOVE])
def test_a_step_fails(step: Point, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling", hooked=False)
    target.wait_for_steps(2)
    with armed(f"{step}:raise"), pytest.raises(PhosError, match="fault point"):
        migrate(node, target.pid, MigrateOptions(moved_to(1)), Progress())
    assert driver_checkpoint.state(target.pid) is driver_checkpoint.State.RUNNING
    computes_right(target, undisturbed)


@pytest.fixture
def counting() -> Iterator[subprocess.Popen[str]]:
    """A process of five threads, one of which prints how far the others are."""
    command = [sys.executable, "-c", THREADS]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_only_one_thread_runs(counting: subprocess.Popen[str]) -> None:
    pid = counting.pid
    first, *_, last = procfs.threads(pid)

    def states() -> dict[int, str]:
        found = {thread: procfs.stat(thread) for thread in procfs.threads(pid)}
        return {thread: stat.state for thread, stat in found.items() if stat is not None}

    with held({pid: last}):
        assert {state for thread, state in states().items() if thread != last} == {"t"}
        assert states()[last] != "t"
        with pytest.raises(Busy, match="traces it"), held({pid: first}):
            pass
        assert states()[first] == "t"
    assert "t" not in states().values()
    assert not procfs.tracer(pid)
    assert counting.stdout is not None
    before = int(counting.stdout.readline())
    wait_until(lambda: int(counting.stdout.readline()) > before, "its threads to run")  # type: ignore[union-attr]


def test_those_that_were_held_when_another_could_not_be_are_let_go(
    counting: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when the kernel has ended the thread that held them."""
    seize, detach = ptrace.seize, ptrace.detach
    seized: list[int] = []
    let_go: list[int] = []

    def first_only(thread: int, *, clones: bool = False) -> None:
        if seized:
            raise PermissionError
        seize(thread, clones=clones)
        seized.append(thread)

    def recorded(thread: int, met: int) -> None:
        detach(thread, met)
        let_go.append(thread)

    monkeypatch.setattr(ptrace, "seize", first_only)
    monkeypatch.setattr(ptrace, "detach", recorded)
    with pytest.raises(Busy), held({counting.pid: counting.pid}):
        pass
    assert let_go == seized != []


def test_one_that_is_late_to_stop_is_let_run(
    counting: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in a group stop that was traced a moment ago stops again only when it is its turn on
    a busy CPU: the context begins when it runs, so that the driver has somebody to ask.
    """
    pid = counting.pid
    last = procfs.threads(pid)[-1]
    with held({pid: last}, through_group_stop=True) as hold:
        os.kill(pid, signal.SIGSTOP)
        hold.await_group_stop({pid})
    looks, whole = iter(range(50)), ptrace.stopped

    def late(thread: int) -> ptrace.Stop | None:
        return None if thread == last and next(looks, None) is not None else whole(thread)

    monkeypatch.setattr(ptrace, "stopped", late)
    with held({pid: last}, through_group_stop=True):
        assert not stopped_state.stands_still(pid)
    wait_until(lambda: stopped_state.stands_still(pid), "it to stand still")
    monkeypatch.setattr(held_threads, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(ptrace, "stopped", lambda thread: None if thread == last else whole(thread))
    with (
        pytest.raises(Timeout, match=f"process {pid} does not stop"),
        held({pid: last}, through_group_stop=True),
    ):
        pass


def test_they_end_meanwhile(counting: subprocess.Popen[str]) -> None:
    pid = counting.pid
    with held({pid: procfs.threads(pid)[-1]}):
        os.kill(pid, 9)
    counting.wait()
    with held({pid: pid}):  # nobody is left to hold
        pass
