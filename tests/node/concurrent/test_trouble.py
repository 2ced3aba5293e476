"""Trouble while a program is saved behind its back: it goes on, or its end is told; what is
published is right; nothing is left of a job that failed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.system.native import python_environment
from phosd.errors import Busy, Cancelled, Internal, NoSuchProcess, PhosError
from tests.node.checkpoint_restore.cycle import computes_right
from tests.node.checkpoint_restore.test_fault_points import left, staging
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.stop_image import differences
from tests.node.concurrent.test_guesses import continues
from tests.node.concurrent.watch import Watch, slow_movers, watched
from tests.support.harness import SELDOM, Target, alive, wait_until

__all__ = ["staging"]  # a fixture: nobody else's files are where this engine stages its own

pytestmark = pytest.mark.parametrize("snapshots", [True, False], ids=["snapshot", "on_write"])

SECONDS = 0.5
CONCURRENT = CheckpointOptions(mode="concurrent", fallback="none")


def amid(phase: str, action: Callable[[Progress], None]) -> Progress:
    """A progress that calls ``action`` once, when a third of the phase's bytes are done."""
    done: list[bool] = []

    def observe(progress: Progress) -> None:
        now = progress.phases[-1]
        if not done and now.name == phase and 0 < now.bytes_total <= 3 * now.bytes_done:
            done.append(True)
            action(progress)

    return Progress(observer=observe)


ENDS = {
    "killed": signal.SIGKILL,
    "crashes": signal.SIGSEGV,
    "ends": signal.SIGINT,  # as an exception that nobody catches: everything is torn down in order
}


@pytest.mark.rotated(of=4)
@pytest.mark.parametrize("end", ENDS)
def test_the_target_ends_while_draining(end: str, node: Node, start: Starter) -> None:
    """Its image is whole, or it is not there and the job says why."""
    target = start("single")
    target.wait_for_steps(5)
    with slow_movers(node, target, SECONDS):
        before = left(node)
        watch = Watch(node, target, drain=lambda: os.kill(target.pid, ENDS[end]))
        try:
            manifest = watch.checkpoint(CONCURRENT)
            assert differences(node.store, manifest.id, watch.memories) == []
            node.store.delete(manifest.id)
        except NoSuchProcess:
            pass
        wait_until(lambda: not alive(target.pid), "the end of the target")
        target.process.wait()
        assert node.store.list() == []
        other = start("threads")  # nothing of the dead one stands in its way
        other.wait_for_steps(5)
        manifest, _ = watched(node, other, CONCURRENT)
        node.store.delete(manifest.id)
        other.kill()
        assert left(node)[1:3] == before[1:3]


@pytest.mark.parametrize("moment", ["begins", "amid"])
def test_a_mover_dies_while_draining(
    moment: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    target.wait_for_steps(5)
    with slow_movers(node, target, 10 * SECONDS if moment == "amid" else SECONDS):
        before = left(node)
        mover = node.movers.mover(0)

        def kill(_: Progress) -> None:
            os.kill(mover.pid, signal.SIGKILL)

        progress = at_phase("drain", kill) if moment == "begins" else amid("drain", kill)
        with pytest.raises(Internal, match="data mover"):
            checkpoint(node, target.pid, CONCURRENT, progress)
        assert node.store.list() == []
        computes_right(target, undisturbed)
        wait_until(lambda: not mover.alive, "the last of its threads to end")
        assert left(node)[1:3] == before[1:3]
    manifest, _ = watched(node, target, CONCURRENT)
    continues(node, target, manifest.id, undisturbed("single"))


def test_the_engine_dies_while_draining(
    snapshots: bool, place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The program waits for nobody who is gone, and can be checkpointed by the next engine."""
    target = start("single")
    target.wait_for_steps(5)
    engine = (
        "import os, sys, pathlib\n"
        "from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint\n"
        "from phosd.engine.node.node import Node, NodeConfig\n"
        "from phosd.engine.job.progress import Progress\n"
        "def observe(progress):\n"
        "    if progress.phases[-1].name == 'drain':\n"
        "        os.kill(os.getpid(), 9)\n"
        "place = pathlib.Path(sys.argv[2])\n"
        "folders = {'state_dir': place / 'other', 'runtime_dir': place / 'run'}\n"
        "config = NodeConfig(**folders, snapshots=sys.argv[3] == 'True')\n"
        "options = CheckpointOptions(mode='concurrent')\n"
        "checkpoint(Node(config), int(sys.argv[1]), options, Progress(observer=observe))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", engine, str(target.pid), str(place), str(snapshots)],
        env=python_environment() | {"PHOS_SOFTGPU_COPY_RATE": "20M"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    target.more_steps(30)  # each of its blocks is written meanwhile
    computes_right(target, undisturbed)
    manifest, _ = watched(node, target, CONCURRENT)
    continues(node, target, manifest.id, undisturbed("single"))


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("phase", ["prepare", "cpu", "drain"])
def test_two_checkpoints_at_once(
    phase: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The second is refused, and does not disturb the first."""
    target = start("single")
    target.wait_for_steps(5)
    refused: list[Busy] = []

    def second() -> None:
        try:
            checkpoint(node, target.pid, CONCURRENT, Progress())
        except Busy as error:
            refused.append(error)

    # When "prepare" begins, nothing is claimed yet: the second is then the first.
    with slow_movers(node, target, SECONDS):
        manifest, _ = watched(node, target, CONCURRENT, **{phase: second})
    assert len(refused) == (phase != "prepare")
    assert len(node.store.list()) == 1 + (phase == "prepare")
    continues(node, target, manifest.id, undisturbed("single"))


@pytest.mark.rotated(of=4)
@pytest.mark.parametrize("mode", ["concurrent", "recopy"])
def test_a_job_is_cancelled_in_every_phase(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single", **SELDOM)
    target.wait_for_steps(5)
    options = CheckpointOptions(mode=mode, fallback="none")
    with slow_movers(node, target, SECONDS):
        whole = Progress()
        checkpoint(node, target.pid, options, whole)
        before = left(node)
        published = 1
        late = []
        for phase in dict.fromkeys(p.name for p in whole.phases):
            for cancelling in (at_phase(phase, Progress.cancel), amid(phase, Progress.cancel)):
                try:
                    manifest = checkpoint(node, target.pid, options, cancelling)
                    node.store.delete(manifest.id)
                    late.append(phase)  # too late, or there was no such moment: then it is whole
                except Cancelled:
                    pass
                assert len(node.store.list()) == published
                assert left(node)[1:3] == before[1:3], f"something is left of a cancelled {phase}"
                target.more_steps(2)
        assert late.count("drain") == 0 or mode != "concurrent", "it could not be cancelled"
    manifest, _ = watched(node, target, options)
    # Once: what is right has to be computed, too, up to where it is.
    computes_right(target, undisturbed)
    continues(node, target, manifest.id, undisturbed("single"))


def test_a_program_that_ends_is_no_mystery(node: Node, start: Starter) -> None:
    """The error of a job whose program dies at any stage of it names the process."""
    for phase in ("prepare", "quiesce", "control", "cpu", "unpark"):
        target: Target = start("single")
        target.wait_for_steps(3)
        pid = target.pid
        progress = at_phase(phase, lambda _: os.kill(pid, signal.SIGKILL))  # noqa: B023
        with pytest.raises(PhosError, match=str(pid)):
            checkpoint(node, pid, CONCURRENT, progress)
        assert node.store.list() == []
        target.kill()
