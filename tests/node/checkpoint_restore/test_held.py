"""Programs without the hook whose threads poll: CRIU holds them while the driver works."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from phosd.engine.criu.dump.dump import DumpOptions
from phosd.engine.criu.run.owned_processes import is_criu
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.program import driver_checkpoint, tree
from phosd.engine.recovery.rescue import bring_back as recover
from phosd.engine.system import procfs
from phosd.engine.system.cuda import is_software
from phosd.engine.system.native import softgpu_folder
from phosd.errors import Internal, NoSuchProcess, PhosError
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    bring_back,
    check,
    computes_right,
    run_cycle,
    save,
)
from tests.node.checkpoint_restore.test_fault_points import armed
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.node.criu.life import USER, Life, in_order
from tests.support.harness import PROGRAMS, alive, wait_until
from tests.support.rotation import times

TIMES = times(3, everything=10, soak=40)
RUNNING = driver_checkpoint.State.RUNNING


def test_they_go_on_where_they_were(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling", hooked=False)
    target.wait_for_steps(2)
    for _ in range(TIMES):
        node.store.delete(save(node, target, "driver").id)
        target.more_steps(1)
    run_cycle(node, target, "driver", undisturbed)


def test_so_they_do_under_the_hook(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Its gate is open in this mode."""
    run_cycle(node, start("polling"), "driver", undisturbed)


@pytest.fixture
def start_bare(node: Node, tmp_path: Path) -> Iterator[Callable[[int], Life]]:
    """Start ``bare.py`` as a user; its numbers are in the log, the child's in ``child``."""
    made: list[Life] = []

    def starter(uid: int) -> Life:
        home = Path(tempfile.mkdtemp(prefix="phos-test-"))
        home.chmod(0o755)
        os.chown(home, uid, uid)
        made.append(life := Life(node.criu, home, tmp_path, uid))
        library = Path("libcuda.so.1")
        if is_software():  # the checkout may be closed to the user
            library = Path(shutil.copy(softgpu_folder() / library, home))
        life.start((PROGRAMS / "bare.py").read_text(), str(library), str(home / "child"))
        return life

    yield starter
    for life in made:
        with suppress(NoSuchProcess):
            for pid in tree.scan(life.pid).pids:
                os.kill(pid, signal.SIGKILL)
        life.end()
        shutil.rmtree(life.home)


@pytest.mark.parametrize("uid", [0, USER])
def test_a_process_and_its_child(uid: int, node: Node, start_bare: Callable[[int], Life]) -> None:
    life = start_bare(uid)
    child = life.home / "child"

    def count_on() -> None:
        for path in (life.log, child):
            assert in_order(life.counts_on(path))

    count_on()
    pids = tree.scan(life.pid).pids
    assert len(pids) == 2
    files = {pid: len(procfs.descriptors(pid)) for pid in pids}
    for _ in range(TIMES):
        image = checkpoint(node, life.pid, CheckpointOptions(mode="driver"), Progress()).id
        assert tree.scan(life.pid).pids == pids
        count_on()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert life.started is not None
    life.started.wait()
    restore(node, image, RestoreOptions(), Progress())
    assert tree.scan(life.pid).pids == pids
    count_on()
    # After its restore the driver may have opened fewer files than before (580, H200: one).
    assert all(len(procfs.descriptors(pid)) <= files[pid] for pid in pids)
    for path in (life.log, child):
        assert len(backs := [1 for a, b in pairwise(life.values(path)) if b <= a]) == 1, backs


@pytest.mark.parametrize(
    "step", ["driver-checkpoint", "checkpoint-cpu", "checkpoint-unpark", "checkpoint-persist"]
)
def test_a_step_fails(step: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """It is undone while the threads are held: they go on asking."""
    target = start("polling", hooked=False)
    target.wait_for_steps(2)
    with armed(f"{step}:raise"), pytest.raises(PhosError, match=step) as raised:
        save(node, target, "driver")
    assert not getattr(raised.value, "__notes__", ())
    assert driver_checkpoint.state(target.pid) is RUNNING
    assert not node.store.list()
    computes_right(target, undisturbed)


@pytest.mark.parametrize("phase", ["control", "cpu", "unpark"])
def test_it_is_cancelled(phase: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling", hooked=False)
    target.wait_for_steps(2)
    with suppress(PhosError):
        options = CheckpointOptions(mode="driver")
        checkpoint(node, target.pid, options, at_phase(phase, Progress.cancel))
    assert driver_checkpoint.state(target.pid) is RUNNING
    computes_right(target, undisturbed)


@pytest.mark.parametrize("phase", ["cpu", "unpark"])
def test_criu_is_killed(phase: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Nothing holds the threads then. The program, which does not poll, goes on."""
    target = start("single", hooked=False)
    target.wait_for_steps(2)

    def kill_criu(_: Progress) -> None:
        tracer = procfs.status(target.pid).tracer
        assert tracer and is_criu(tracer)
        os.kill(tracer, signal.SIGKILL)

    with pytest.raises(Internal, match="criu dump failed"):
        options = CheckpointOptions(mode="driver")
        checkpoint(node, target.pid, options, at_phase(phase, kill_criu))
    assert driver_checkpoint.state(target.pid) is RUNNING
    computes_right(target, undisturbed)


@pytest.mark.parametrize("step", ["driver-checkpoint", "checkpoint-cpu", "checkpoint-unpark"])
def test_the_engine_is_killed(
    step: str, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """CRIU lets the program go, which does not poll; the next engine brings it back."""
    target = start("single", hooked=False)
    target.wait_for_steps(2)
    program = """
import sys, pathlib
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
from phosd.engine.operations.checkpoint import *
place = pathlib.Path(sys.argv[1])
node = Node(NodeConfig(place / "state", place / "run"))
checkpoint(node, int(sys.argv[2]), CheckpointOptions(mode="driver"), Progress())
"""
    words = [sys.executable, "-c", program, str(place), str(target.pid)]
    log = place / "engine.log"
    with log.open("ab") as said:  # not a pipe, which its movers would keep open
        fault = os.environ | {"PHOS_FAULT": f"{step}:kill"}
        done = subprocess.run(words, env=fault, stderr=said, timeout=60)
    assert done.returncode == -signal.SIGKILL, log.read_text()
    wait_until(lambda: not procfs.tracer(target.pid), "CRIU to let the program go")
    with Node(NodeConfig(place / "state", place / "run")) as node:
        recover(target.pid, node.config.runtime_dir)
        assert driver_checkpoint.state(target.pid) is RUNNING
    computes_right(target, undisturbed)


def test_the_driver_hangs(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a thread that is held has a lock: the deadline passes, and all threads run."""
    target = start("single", hooked=False)
    target.wait_for_steps(2)
    whole = driver_checkpoint.checkpoint

    def slow(pid: int) -> None:
        wait_until(lambda: not procfs.tracer(pid), "the deadline of the dump")
        whole(pid)

    monkeypatch.setattr(driver_checkpoint, "checkpoint", slow)
    module = sys.modules["phosd.engine.operations.checkpoint.checkpoint"]
    monkeypatch.setattr(module, "DumpOptions", partial(DumpOptions, deadline=3.0))
    with pytest.raises(PhosError, match=r"in time|within"):
        save(node, target, "driver")
    assert driver_checkpoint.state(target.pid) is RUNNING
    computes_right(target, undisturbed)


def test_it_is_stopped_meanwhile(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, which the driver's thread cannot block, waits until the program is let go."""
    target = start("polling", hooked=False)
    target.wait_for_steps(2)
    whole = driver_checkpoint.checkpoint

    def stopping(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        whole(pid)

    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "checkpoint", stopping)
        image = save(node, target, "driver").id
    wait_until(lambda: (found := procfs.stat(target.pid)) and found.state == "T", "its stop")
    os.kill(target.pid, signal.SIGCONT)
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, image), original, undisturbed("polling"))


@pytest.mark.parametrize("how", ["raises", "cancelled", "dies", "criu dies"])
def test_its_restore_fails(
    how: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While CRIU holds what it has restored: nothing of it stays, and the next restore succeeds."""
    target = start("polling", hooked=False)
    target.wait_for_steps(3)
    image = save(node, target, "driver").id
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    progress = Progress()
    whole = driver_checkpoint.restore

    def failing(pid: int, _pairs: object = ()) -> None:
        tracer = procfs.status(pid).tracer
        assert is_criu(tracer)
        if how == "raises":
            raise Internal("the driver does not want to", hint="a test did that")
        if how == "cancelled":
            progress.cancel()
            wait_until(lambda: not alive(tracer), "CRIU to be killed")
        else:
            os.kill(pid if how == "dies" else tracer, signal.SIGKILL)
        whole(pid)

    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "restore", failing)
        with pytest.raises(PhosError):
            restore(node, image, RestoreOptions(), progress)
    assert not any(alive(pid) for pid in target.pids)
    check(bring_back(node, target, image), original, undisturbed("polling"))
