"""Processes that share device memory, whose kernels wait for each other, and programs with kernels
that take long, beside others.
"""

import time

import pytest

from phosd.engine.hook_client import long_work
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations import move_checks
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.errors import Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, bring_back, computes_right, save
from tests.support.harness import Target, alive, children

TRYING = 120.0
"""Seconds until a gate closes within a long kernel; on a busy machine there are pauses between."""


@pytest.fixture
def users(node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch) -> tuple[Target, Target]:
    """A pair and another program, of which NVML tells, and of a mover; the software GPU has no
    NVML.
    """
    pair, other = start("shared_pair"), start("single")
    for target in (pair, other):
        target.wait_for_steps(3)
    known = [pair.pid, *children(pair.pid), other.pid, node.movers.mover(0).pid]
    monkeypatch.setattr(
        move_checks, "users_of", lambda gpus: {pid: 0 for pid in known if alive(pid) and 0 in gpus}
    )
    return pair, other


def test_they_are_neither_saved_nor_restored_there(
    node: Node, users: tuple[Target, Target], undisturbed: Undisturbed
) -> None:
    pair, other = users
    with pytest.raises(Unsupported, match=rf"pid {other.pid} .* uses GPU 0, too"):
        checkpoint(node, pair.pid, CheckpointOptions(mode="stop"), Progress())
    save(node, other, "stop")  # a program whose kernels wait for no other process's
    computes_right(other, undisturbed)
    computes_right(pair, undisturbed)
    other.kill()
    image = save(node, pair, "stop")  # beside a mover
    pair.kill()
    bring_back(node, pair, image.id)


def test_they_are_not_restored_or_resumed_there(
    node: Node, users: tuple[Target, Target], start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, other = users
    suspend(node, pair.pid, SuspendOptions(), Progress())
    with pytest.raises(Unsupported, match=f"end or suspend process {other.pid}"):
        resume(node, pair.pid, ResumeOptions(), Progress())
    other.kill()
    resume(node, pair.pid, ResumeOptions(), Progress())
    image = save(node, pair, "stop")
    pair.more_steps(2)
    pair.kill()
    third = start("single")
    third.wait_for_steps(2)
    monkeypatch.setattr(move_checks, "users_of", lambda gpus: {third.pid: min(gpus)})
    with pytest.raises(Unsupported, match=f"end or suspend process {third.pid}"):
        restore(node, image.id, RestoreOptions(), Progress())
    third.kill()
    monkeypatch.setattr(move_checks, "users_of", lambda gpus: {})
    bring_back(node, pair, image.id)


@pytest.mark.usefixtures("two_gpus")
def test_they_do_not_move_there(
    node: Node,
    users: tuple[Target, Target],
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, other = users
    monkeypatch.setattr(move_checks, "users_of", lambda gpus: {other.pid: 1} if 1 in gpus else {})
    with pytest.raises(Unsupported, match="uses GPU 1, too"):
        migrate(node, pair.pid, MigrateOptions("1"), Progress())
    computes_right(pair, undisturbed)


@pytest.mark.parametrize("mode", ["stop", "concurrent"])
def test_a_program_with_long_kernels_is_not_saved_there(
    mode: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU would interrupt them no more."""
    monkeypatch.setattr(long_work, "LONG", 0.2)
    target, other = start("blocked", arguments=("0", "stream", "0.5")), start("single")
    target.wait_for_steps(2)
    options = CheckpointOptions(mode=mode, deadline=60)
    seen = {target.pid: 0, other.pid: 0}
    monkeypatch.setattr(move_checks, "users_of", lambda gpus: seen if 0 in gpus else {})
    refused = rf"pid {other.pid} .* programs whose kernels take seconds would be ended"
    with pytest.raises(Unsupported, match=refused):
        give_up = time.monotonic() + TRYING
        while time.monotonic() < give_up:
            checkpoint(node, target.pid, options, Progress())
    other.kill()
    del seen[other.pid]
    checkpoint(node, target.pid, options, Progress())
    computes_right(target, undisturbed)
