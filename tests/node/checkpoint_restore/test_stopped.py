"""A program that is stopped (Ctrl-Z, a debugger): the driver would wait for it for ever."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery.rescue import free
from phosd.engine.recovery.startup import settle
from phosd.engine.recovery.stranded import stranded
from phosd.engine.system.procfs import process_id
from phosd.errors import Busy
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right, run_cycle, save
from tests.support.harness import Target, halt

T = TypeVar("T")
SOON = 20.0
"""Seconds that a busy machine may take for what does not wait for anybody."""


@contextmanager
def stopped(target: Target) -> Iterator[None]:
    halt(target.pid)
    try:
        yield
    finally:
        os.kill(target.pid, signal.SIGCONT)


def soon(target: Target, work: Callable[[], T]) -> T:
    """What ``work`` gives, which must not wait for the target."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            return future.result(SOON)
        except TimeoutError:
            os.kill(target.pid, signal.SIGCONT)  # so that the thread ends
            pytest.fail("it waits for a process that is stopped")


def test_it_is_listed_and_left_alone(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target, other = start("single"), start("threads")
    for each in target, other:
        each.wait_for_steps(3)
    for known in False, True:
        if known:
            node.processes()
        with stopped(target):
            listed = {p.pid: p for p in soon(target, node.processes)}
            assert listed[target.pid].state == "stopped"
            assert f"kill -CONT {target.pid}" in listed[target.pid].reason
            assert (listed[target.pid].hook_state == "hooked") is known
            assert listed[other.pid].state == "running"
            with pytest.raises(Busy, match=f"process {target.pid} is stopped"):
                soon(target, lambda: save(node, target, "stop"))
    assert {p.pid: p.state for p in node.processes()}[target.pid] == "running"
    run_cycle(node, target, "stop", undisturbed)


def test_a_suspended_one_waits_for_its_owner(
    place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    config = NodeConfig(place / "state", place / "run")
    with Node(config) as node:
        target = start("single")
        target.wait_for_steps(3)
        suspend(node, target.pid, SuspendOptions(), Progress())
    with stopped(target), Node(config) as node:
        assert soon(target, lambda: settle(node, [])) == {}
        assert [each.pid for each in node.suspended.living()] == [target.pid]
        with pytest.raises(Busy, match="is stopped"):
            soon(target, lambda: resume(node, target.pid, ResumeOptions(), Progress()))
    with Node(config) as node:
        resume(node, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)


def test_recovery_tells_of_it_and_does_not_wait(
    place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single", hooked=False)
    target.wait_for_steps(3)
    known = process_id(target.pid)
    assert known is not None
    driver_checkpoint.lock(target.pid)
    with stopped(target):
        account = soon(target, lambda: free({known}, place / "run"))
        assert "is stopped" in account.text([target.pid])
        soon(target, lambda: stranded(place / "run"))
    time.sleep(0.05)
    assert "runs again" in free({known}, place / "run").text([target.pid])
    computes_right(target, undisturbed)
