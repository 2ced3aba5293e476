"""Programs with threads that poll all the time: the driver answers these calls without a lock from
memory that its checkpoint takes away, so that a thread in one then ends the program.
"""

import itertools

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right, run_cycle, save
from tests.support.rotation import times

MODES = ("concurrent", "stop", "recopy")
STORM = times(len(MODES), everything=15, soak=200)
THREADS = 32


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("mode", MODES)
def test_they_go_on_where_they_were(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    run_cycle(node, start("polling"), mode, undisturbed)


def test_they_sleep(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling")
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


@pytest.mark.usefixtures("two_gpus")
def test_they_move(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling")
    target.wait_for_steps(3)
    migrate(node, target.pid, MigrateOptions("1"), Progress())
    computes_right(target, undisturbed)


def test_a_storm(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling", extra={"PHOS_TEST_POLLERS": str(THREADS)})
    target.wait_for_steps(2)
    for mode in itertools.islice(itertools.cycle(MODES), STORM):
        node.store.delete(save(node, target, mode).id)
        target.more_steps(1)
    computes_right(target, undisturbed)
