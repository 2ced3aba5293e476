"""Lists of processes beside checkpoints: neither is in the other's way."""

import dataclasses
import socket
import threading
import time

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.claims import Claims
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.system import sockets
from phosd.errors import Busy
from tests.node.checkpoint_restore.conftest import Starter
from tests.support.harness import wait_until


def under_a_job(claims: Claims, pid: int) -> bool:
    with claims.asking(pid) as free:
        return not free


def test_a_job_waits_for_whoever_asks_and_nobody_asks_under_it() -> None:
    claims = Claims()
    order: list[str] = []
    began = threading.Event()

    def work() -> None:
        began.set()
        with claims.claim([1, 2]):
            order.append("job")

    with claims.asking(2) as free, claims.asking(2) as too:
        assert free and too
        job = threading.Thread(target=work)
        job.start()
        began.wait()
        wait_until(lambda: under_a_job(claims, 1), "the job to take its processes, and wait")
        with pytest.raises(Busy, match="process 2"), claims.claim([2]):
            pass
        order.append("asked")
    job.join()
    assert order == ["asked", "job"]
    with claims.asking(1) as free, claims.claim([3]), claims.asking(3) as under:
        assert free
        assert not under


def control_socket(pid: int) -> str:
    """The abstract name under which the software GPU in a process listens."""
    return next(
        found.name
        for found in sockets.unix_sockets().values()
        if found.listening and found.name.startswith(f"@phos-softgpu-{pid}-")
    )


def test_a_process_that_is_being_asked_is_saved_when_that_is_over(
    node: Node, start: Starter
) -> None:
    """As the program of another user would be for a root that lists processes."""
    assert node.criu  # found, and tried, which takes a while
    target = start("single")
    target.wait_for_steps(2)
    asked = threading.Event()

    def ask() -> None:
        with (
            node._claims.asking(target.pid) as free,
            socket.socket(socket.AF_UNIX) as control,
        ):
            assert free
            control.connect("\0" + control_socket(target.pid)[1:])
            asked.set()
            time.sleep(1.0)  # a busy machine takes its time between two steps of a list

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(60)
    checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    asking.join()
    target.more_steps(2)


def test_a_process_under_a_job_is_listed_as_it_was(node: Node, start: Starter) -> None:
    target = start("single")
    target.wait_for_steps(2)
    (before,) = [p for p in node.processes() if p.pid == target.pid]
    assert before.device_bytes > 0
    with node.claim([target.pid]):
        (now,) = [p for p in node.processes() if p.pid == target.pid]
    assert now == dataclasses.replace(before, reason="a job works on it")
