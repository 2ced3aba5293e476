"""Suspending and resuming: a program leaves its GPU and comes back, on the same or another."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node import inspection
from phosd.engine.node.gpus import list_gpus
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery.startup import settle
from phosd.errors import Busy, Internal, OutOfSpace
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    all_compute_right,
    bring_back,
    computes_right,
    save,
)
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.gpu_memory import free, taken
from tests.support.harness import wait_until


@pytest.mark.parametrize("full", [False, True])
def test_the_driver_has_it_before_its_memory_is_saved(
    full: bool,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the memory cannot be saved, it comes back and runs on."""
    target = start("single")
    target.wait_for_steps(3)
    write = MemoryDump.save

    def later(dump: MemoryDump, digests: Any, progress: Progress) -> Any:
        away = driver_checkpoint.State.CHECKPOINTED
        wait_until(lambda: driver_checkpoint.state(target.pid) is away, "the driver's checkpoint")
        if full:
            raise OutOfSpace("the disk is full")
        return write(dump, digests, progress)

    monkeypatch.setattr(MemoryDump, "save", later)
    with pytest.raises(OutOfSpace) if full else nullcontext():
        suspend(node, target.pid, SuspendOptions(), Progress())
    assert [each.pid for each in node.suspended.all()] == ([] if full else [target.pid])
    if not full:
        resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


def test_with_a_context_and_no_device_memory(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Its gate opens, although there is nothing to map."""
    target = start("host_only")
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("program", ["single", "features"])
def test_off_and_on_again(
    program: str, where: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    before = free(0), free(1)  # a mover of an earlier test may be about to end
    target = start(program)
    target.wait_for_steps(5)
    gpu = list_gpus()[0]
    assert target.pid in gpu.pids and gpu.memory_used is not None
    assert 0 < gpu.memory_used <= gpu.memory_total - free(0)  # NVML leaves out what it reserves
    suspended = suspend(node, target.pid, SuspendOptions(where=where), Progress())
    assert target.pid not in list_gpus()[0].pids
    assert free(0) >= before[0] and free(1) >= before[1]
    assert suspended.where == where
    (listed,) = [p for p in node.processes() if p.pid == target.pid]
    assert (listed.state, listed.gpus, listed.device_bytes) == ("suspended", (), 0)
    assert f"program needs {suspended.device_bytes[0] >> 20} MiB on GPU 0" in listed.reason
    for look in (inspection.blocks, inspection.kernels, inspection.log):
        with pytest.raises(Busy, match=f"{target.pid} is suspended; `phos resume"):
            look(node, listed.id)  # without waiting for its hook, which stands still
    steps = len(target.values())
    assert resume(node, target.pid, ResumeOptions(), Progress()) == {0: 0}
    target.wait_for_steps(steps + 5)
    suspend(node, target.pid, SuspendOptions(where=where), Progress())
    assert resume(node, target.pid, ResumeOptions("1"), Progress()) == {0: 1}
    computes_right(target, undisturbed)
    (listed,) = [p for p in node.processes() if p.pid == target.pid]
    assert (listed.state, listed.gpus) == ("running", (1,))
    assert not node.suspend_store.shelf(where).list()
    assert not node.suspended.all()


def test_two_programs_take_turns(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    first, second = start("single"), start("features")
    for target in (first, second):
        target.wait_for_steps(3)
    suspend(node, second.pid, SuspendOptions(), Progress())
    for leaving, coming in ((first, second), (second, first), (first, second)):
        leaving.more_steps(2)
        swap(node, leaving.pid, coming.pid, SwapOptions(), Progress())
        states = {p.pid: p.state for p in node.processes()}
        assert (states[leaving.pid], states[coming.pid]) == ("suspended", "running")
        coming.more_steps(2)
    resume(node, first.pid, ResumeOptions("1"), Progress())
    all_compute_right(undisturbed, first, second)


def test_a_neighbour_leaves_whose_mover_did_not_start(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is exported and kept for the next job, which no mover has."""

    def killed(*_: object) -> Mover:
        raise Internal("the data mover ended", hint="try again")

    first, second = start("single"), start("features")
    for target in (first, second):
        target.wait_for_steps(3)
    with monkeypatch.context() as patch, pytest.raises(Internal, match="mover ended"):
        patch.setattr(Mover, "start", killed)
        suspend(node, first.pid, SuspendOptions(), Progress())
    for target in (second, first):
        suspend(node, target.pid, SuspendOptions(), Progress())
    for target in (first, second):
        resume(node, target.pid, ResumeOptions(), Progress())
    all_compute_right(undisturbed, first, second)


def test_nothing_is_copied_on_the_gpu_when_it_leaves_again(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """What a resume and a restore have loaded is kept: a program whose largest block has no room
    for a second of its size can be suspended, and saved, again and again.
    """
    target = start("single", extra={"PHOS_FAULT": "hook-rehome"})
    for _ in range(2):
        target.more_steps(2)
        suspend(node, target.pid, SuspendOptions(), Progress())
        resume(node, target.pid, ResumeOptions(), Progress())
    image = save(node, target, "stop").id
    target.more_steps(20)
    target.kill()
    bring_back(node, target, image)
    save(node, target, "stop")
    computes_right(target, undisturbed)


@pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "bare"])
def test_it_fails_when_a_neighbour_has_all_memory(
    hooked: bool, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """What the driver needs to bring the program back is kept until it is suspended."""
    target = start("single", hooked=hooked)
    target.wait_for_steps(3)
    with ExitStack() as neighbours:

        def fill_up(_: Progress) -> None:
            neighbours.enter_context(taken(0))
            raise OutOfSpace("the disk is full", hint="delete images")

        with pytest.raises(OutOfSpace) as raised:
            suspend(node, target.pid, SuspendOptions("disk"), at_phase("publish", fill_up))
        assert not getattr(raised.value, "__notes__", ())
        assert driver_checkpoint.state(target.pid) is driver_checkpoint.State.RUNNING
        target.more_steps(AFTER)
    computes_right(target, undisturbed)
    assert not node.suspended.all()


@pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "bare"])
def test_the_engine_is_killed_when_a_neighbour_has_all_memory(
    hooked: bool, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single", hooked=hooked)
    target.wait_for_steps(3)
    program = """
import sys, pathlib
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
from phosd.engine.operations.suspend import *
place = pathlib.Path(sys.argv[1])
node = Node(NodeConfig(place / "state", place / "run"))
suspend(node, int(sys.argv[2]), SuspendOptions("disk"), Progress())
"""
    words = [sys.executable, "-c", program, str(place), str(target.pid)]
    log = place / "engine.log"
    with log.open("ab") as said:  # not a pipe, which its movers would keep open
        fault = os.environ | {"PHOS_FAULT": "suspend-publish:kill"}
        done = subprocess.run(words, env=fault, stderr=said, timeout=60)
    assert done.returncode == -signal.SIGKILL, log.read_text()
    with taken(0), Node(NodeConfig(place / "state", place / "run")) as node:
        settle(node, [])
        assert driver_checkpoint.state(target.pid) is driver_checkpoint.State.RUNNING
        target.more_steps(AFTER)
    computes_right(target, undisturbed)
