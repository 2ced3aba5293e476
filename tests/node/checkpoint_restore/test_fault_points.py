"""A failure at every step of a job: the program goes on, nothing is left, the next job succeeds."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phosd.engine import faults
from phosd.engine.faults import Point
from phosd.engine.hook_client.channel import Channel
from phosd.engine.hook_client.wire import Type
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.node import staging as staging_module
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.errors import Internal, NoSuchProcess, PhosError, Timeout
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
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.harness import PATIENCE, Target, alive, children, wait_until
from tests.support.rotation import part

PART = 2
"""One in so many steps fails in the tests of each commit."""
STEPS = [p for p in Point if p.startswith(("checkpoint-", "parking-", "driver-", "manifest-"))]
STOP_ONLY = {
    Point.CHECKPOINT_QUIESCE,
    Point.CHECKPOINT_DIGEST,
    Point.CHECKPOINT_DRAIN,
    Point.CHECKPOINT_PARK,
    Point.PARKING_PARK,
}
EACH_PROCESS = {
    Point.PARKING_PARK,
    Point.PARKING_DETACH,
    Point.DRIVER_LOCK,
    Point.DRIVER_CHECKPOINT,
}
RESTORE_STEPS = [p for p in Point if p.startswith("restore-") and p is not Point.RESTORE_PAGES]
"""But for the one that a program with large memory comes to (tests/node/criu)."""


@pytest.fixture(autouse=True)
def staging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Memory for CRIU's files that only this test uses, so that what is left there is seen."""
    with tempfile.TemporaryDirectory(prefix="phos-test-", dir="/dev/shm") as folder:
        monkeypatch.setattr(staging_module, "MEMORY", Path(folder))
        yield Path(folder)


@contextmanager
def armed(fault: str) -> Iterator[None]:
    """Inside, this fault happens in this process, as ``PHOS_FAULT`` would have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "_armed", faults.parse(fault))
        patch.setattr(faults, "_visits", {})
        yield


def attempt(node: Node, target: Target, mode: str, progress: Progress | None = None) -> Manifest:
    return checkpoint(node, target.pid, CheckpointOptions(mode=mode), progress or Progress())


def left(node: Node) -> tuple[int, list[Path], list[Path], int]:
    """What a failed job must not leave: descriptors, image folders and packs, staging, blocks that
    the mover has (it keeps a descriptor of each).
    """
    disk = node.store.disk
    stored = [p for kind in (disk.images, disk.packs) for p in sorted(kind.iterdir())]
    staging = list(staging_module.MEMORY.iterdir())
    ours, movers = (lasting(pid) for pid in (os.getpid(), node.movers.mover(0).pid))
    return ours, stored, staging, movers


def lasting(pid: int) -> int:
    """How many descriptors a process has, but for those with which it looks at others."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += not str(link.readlink()).startswith("/proc/")
    return count


def forgotten(node: Node) -> bool:
    """Whether nothing is kept any more of processes that have ended."""
    node.processes()
    return not node.kept_memory._kept


def settled(node: Node, before: object) -> None:
    """All is as it was before, when the mover has closed what it was told to close."""
    end = time.monotonic() + PATIENCE
    while left(node) != before and time.monotonic() < end:
        time.sleep(0.05)
    assert left(node) == before


def refused(node: Node, target: Target, mode: str, fault: str, undisturbed: Undisturbed) -> None:
    """The job fails with the fault as its reason, and leaves all as it was."""
    before = left(node)
    with armed(fault), pytest.raises(PhosError, match="fault point") as raised:
        attempt(node, target, mode)
    assert not getattr(raised.value, "__notes__", ()), "what failed could not be undone"
    settled(node, before)
    computes_right(target, undisturbed)


@pytest.mark.parametrize(("program", "mode"), [("single", "stop"), ("single", "driver")])
def test_every_step_of_a_checkpoint_fails(
    program: str, mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start(program)
    target.wait_for_steps(3)
    first = save(node, target, mode)
    for step in part(f"steps of {mode}", STEPS, PART):
        if mode == "stop" or step not in STOP_ONLY:
            refused(node, target, mode, f"{step}:raise", undisturbed)
    verify(node.store, first.id, Progress())
    run_cycle(node, target, mode, undisturbed)


def test_every_step_fails_for_one_of_two_processes(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """What was done to the first when the second failed is undone."""
    target = start("shared_pair")
    target.wait_for_steps(3)
    save(node, target, "stop")
    for step in part("steps for one of two", STEPS, PART):
        for visit in (1, 2) if step in EACH_PROCESS else (1,):
            refused(node, target, "stop", f"{step}:{visit}:raise", undisturbed)
    run_cycle(node, target, "stop", undisturbed)


def test_every_step_of_a_restore_fails(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("shared_pair")
    target.wait_for_steps(3)
    image = save(node, target, "stop").id
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    node.movers.mover(0)
    wait_until(partial(forgotten, node), "the end of its watch")
    before = left(node)
    for step in part("steps of a restore", RESTORE_STEPS, PART):
        with armed(f"{step}:raise"), pytest.raises(Internal, match=f"fault point {step}"):
            restore(node, image, RestoreOptions(), Progress())
        assert not any(alive(pid) for pid in target.pids), f"{step} left a process"
        settled(node, before)
    check(bring_back(node, target, image), original, undisturbed("shared_pair"))


def test_the_mover_dies_in_every_phase(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """What is parked is kept by the engine as well; without the mover no image is made, and nothing
    is parked.
    """
    target = start("single")
    target.wait_for_steps(3)
    whole = Progress()
    attempt(node, target, "stop", whole)
    published, failed = 1, set()
    for phase in (p.name for p in whole.phases[1:]):
        mover = node.movers.mover(0)
        try:
            attempt(node, target, "stop", at_phase(phase, lambda _: kill(mover.pid)))  # noqa: B023
            published += 1
        except Internal as error:
            failed.add(phase)
            assert "data mover" in str(error)
        wait_until(lambda: not mover.alive, "the last of its threads to end")  # noqa: B023
        assert len(node.store.list()) == published
        computes_right(target, undisturbed)
    assert failed >= {"quiesce", "digest", "drain", "park"} and "control" not in failed
    for manifest in node.store.list():
        verify(node.store, manifest.id, Progress())
    run_cycle(node, target, "stop", undisturbed)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), f"{pid} to end")


@pytest.mark.parametrize("phase", ["quiesce", "digest", "park", "control", "cpu", "unpark"])
def test_the_second_process_dies(phase: str, node: Node, start: Starter) -> None:
    """The error says who ended; the first is set free: it meets the loss, and no CUDA error."""
    target = start("shared_pair")
    target.wait_for_steps(3)
    target.pids = [target.pid, *children(target.pid)]
    second = target.pids[1]
    with pytest.raises(NoSuchProcess) as raised:
        attempt(node, target, "stop", at_phase(phase, lambda _: kill(second)))
    # Where it waits for the second, not at its gate, the first may end before it is asked.
    found = re.match(r"process (\d+) ended", raised.value.what)
    assert found and int(found[1]) in target.pids and not alive(int(found[1])), raised.value
    wait_until(lambda: not alive(target.pid), "the first process to notice")
    target.process.wait()
    said = target.errors.read_text()
    assert not said or "BrokenPipeError" in said or "ConnectionResetError" in said, said
    assert node.store.list() == []


@pytest.mark.parametrize("mode", ["stop", "driver"])
def test_criu_is_killed(
    mode: str, node: Node, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """At several instants of a dump, until one is over before that, and of a restore. Where it runs
    its own code in the program, that one ends with it (docs/operate/recovery.md), and its
    image is what is left.
    """
    moment = place / "moment"
    killer = place / "criu"
    killer.write_text(
        "#!/bin/sh\n"
        f'[ -e {moment} ] || exec {node.criu.path} "$@"\n'
        f'exec timeout -s KILL "$(cat {moment})" {node.criu.path} "$@"\n'
    )
    killer.chmod(0o755)
    with Node(NodeConfig(place / "other", place / "run", criu=killer)) as cut_short:
        target = start("single")
        target.wait_for_steps(3)
        image = save(cut_short, target, mode).id
        images = [image]
        for delay in ("0.005", "0.02", "0.05", "0.1"):
            moment.write_text(delay)
            try:
                images.append(save(cut_short, target, mode).id)
            except Internal as error:
                assert "criu" in str(error).lower()
            except NoSuchProcess as error:
                # With what CRIU said, unless the end was met first where the driver was asked.
                ended = rf"process {target.pid} ended during its checkpoint( \(criu .*)?; nothing"
                assert re.match(ended, str(error)), error
                moment.unlink()
                target.kill()
                bring_back(cut_short, target, images[-1])
            assert sorted(m.id for m in cut_short.store.list()) == sorted(images)
            computes_right(target, undisturbed)
            if len(images) > 1:
                break
        assert delay != "0.005", "no dump was cut short"
        target.more_steps(AFTER)
        target.kill()
        original = target.values()
        for delay in ("0.005", "0.02"):
            moment.write_text(delay)
            with pytest.raises(Internal, match=r"(?i)criu"):
                restore(cut_short, image, RestoreOptions(), Progress())
            assert not any(alive(pid) for pid in target.pids)
        moment.unlink()
        check(bring_back(cut_short, target, image), original, undisturbed("single"))


@pytest.mark.parametrize("request_", ["PARK", "DETACH", "UNPARK"])
def test_the_answer_to_a_request_is_lost(
    request_: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was carried out, but nobody knows: the process must not stay parked."""
    target = start("shared_pair")
    target.wait_for_steps(3)
    whole = Channel.request
    lost: list[str] = []

    def lossy(self: Channel, type_: Type, *rest: Any) -> tuple[bytes, list[int]]:
        answer = whole(self, type_, *rest)
        if type_.name == request_ and not lost:
            lost.append(request_)
            self.close()
            raise Timeout(f"the answer to {request_} is lost", hint="a test did that")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "request", lossy)
        with pytest.raises(Timeout, match="is lost"):
            attempt(node, target, "stop")
    assert node.store.list() == []
    computes_right(target, undisturbed)
    run_cycle(node, target, "stop", undisturbed)
