"""Programs that are ready: hollow, with their memory loaded, so that they only have to run."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.admission import require_device_memory
from phosd.engine.operations.end import end_suspended
from phosd.engine.operations.permissions import ROOT
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.startup import settle
from phosd.errors import Busy, InvalidOption, NotAuthorized, OutOfMemory
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.node.moves.killed_engine import killed_at
from tests.node.moves.random_moves import gpus_of
from tests.support.harness import Target, wait_until

HOLLOW = SuspendOptions(hollow=True)
READY = ResumeOptions(ready=True)


def level(node: Node, target: Target) -> str:
    """What `phos ps` would tell of the program."""
    (found,) = [each for each in node.processes() if each.pid == target.pid]
    if found.away is None:
        return found.state
    names = {(False, False): "suspended", (True, False): "hollow", (True, True): "ready"}
    return names[found.away.hollow, found.away.ready]


def free(node: Node, *gpus: int) -> list[int]:
    return [node.movers.mover(gpu).free_memory()[0] for gpu in gpus]


@contextmanager
def ready(node: Node, start: Starter, program: str = "single") -> Iterator[Target]:
    """A program that is ready."""
    target = start(program)
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())
    resume(node, target.pid, READY, Progress())
    assert level(node, target) == "ready"
    yield target


@pytest.mark.parametrize("program", ["single", "two_devices", "shared_pair"])
def test_each_level_from_each_other(
    program: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start(program)
    target.wait_for_steps(3)
    used = gpus_of(node, target)
    steps: dict[str, Callable[[], object]] = {
        "hollow": lambda: suspend(node, target.pid, HOLLOW, Progress()),
        "suspended": lambda: suspend(node, target.pid, SuspendOptions(), Progress()),
        "ready": lambda: resume(node, target.pid, READY, Progress()),
        "risen": lambda: resume(node, target.pid, ResumeOptions(hollow=True), Progress()),
        "running": lambda: resume(node, target.pid, ResumeOptions(), Progress()),
    }
    way = [
        *("hollow", "ready", "hollow", "ready", "running", "suspended", "ready", "suspended"),
        *("risen", "ready", "running", "hollow", "running"),
    ]
    for name in way:
        steps[name]()
        assert level(node, target) == {"risen": "hollow"}.get(name, name)
        asleep = name != "running"
        assert (driver_checkpoint.state(target.pid) is State.CHECKPOINTED) == (name == "suspended")
        assert len(node.suspended.all()) == asleep and not left_parked(node.config.runtime_dir)
        if not asleep:
            assert gpus_of(node, target) == used
            computes_right(target, undisturbed)


def test_its_start_loads_nothing(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """All of it is on the GPUs, and it stands still; then it runs at once, and all is free."""
    target = start("two_devices")
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())
    before = free(node, 0, 1)
    resume(node, target.pid, READY, Progress())
    (entry,) = node.suspended.all()
    assert entry.hollow
    there = [a - b for a, b in zip(before, free(node, 0, 1), strict=True)]
    assert all(there) and sum(there) >= sum(entry.device_bytes.values())
    position = target.position()
    progress = Progress()
    resume(node, target.pid, ResumeOptions(), progress)
    assert "load" not in [phase.name for phase in progress.phases]
    assert not node.readied.images()
    computes_right(target, undisturbed)
    assert target.position() > position


def test_it_gives_way_to_what_is_to_run(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as many as it takes, and not to another one that is to be ready."""
    with ready(node, start) as first, ready(node, start, "features") as second:
        (room,) = free(node, 0)
        with monkeypatch.context() as patch:
            patch.setattr(node.movers.mover(0), "free_memory", lambda: (0, room))
            suspend(node, second.pid, HOLLOW, Progress())
            with pytest.raises(OutOfMemory, match="GPU 0 has 0 B free"):
                resume(node, second.pid, READY, Progress())
        assert (level(node, first), level(node, second)) == ("ready", "hollow")
        resume(node, second.pid, READY, Progress())
        (room,) = free(node, 0)
        require_device_memory(node, {0: room})
        assert (level(node, first), level(node, second)) == ("ready", "ready")
        require_device_memory(node, {0: room + 1})
        assert (level(node, first), level(node, second)) == ("hollow", "ready")
        with pytest.raises(OutOfMemory):
            require_device_memory(node, {0: 1 << 50})
        assert level(node, second) == "ready", "that would not have been enough"
        for each in (first, second):
            resume(node, each.pid, ResumeOptions(), Progress())
            computes_right(each, undisturbed)


def test_without_its_mover_it_is_hollow(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    with ready(node, start, "two_devices") as target:
        mover = node.movers.mover(1)
        os.kill(mover.pid, signal.SIGKILL)
        wait_until(lambda: not mover.alive, "the mover's end")
        assert level(node, target) == "hollow"
        before = free(node, 0)
        resume(node, target.pid, READY, Progress())
        assert free(node, 0) == before, "what the other mover had of it is free"
        assert level(node, target) == "ready"
        resume(node, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_its_end_frees_its_memory(end: str, node: Node, start: Starter) -> None:
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())
    before = free(node, 0)
    resume(node, target.pid, READY, Progress())
    if end == "ended":
        with pytest.raises(NotAuthorized):
            end_suspended(node, target.pid, 12345, Progress())
        assert level(node, target) == "ready"
        end_suspended(node, target.pid, ROOT, Progress())
    else:
        os.kill(target.pid, signal.SIGKILL)

    def has_ended() -> bool:
        node.suspend_store.forget_the_dead()  # with cgroup v1 it dies only when phosd looks
        return target.process.poll() is not None

    wait_until(has_ended, "its end")
    node.processes()
    assert free(node, 0)[0] >= before[0] and not node.readied.images()


def test_what_fails_leaves_it_as_it_was(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, HOLLOW, Progress())
    before = free(node, 0)
    with pytest.raises(Exception, match="cancel"):
        resume(node, target.pid, READY, at_phase("load", Progress.cancel))
    assert level(node, target) == "hollow" and free(node, 0) == before
    with pytest.raises(InvalidOption, match="two levels"):
        resume(node, target.pid, ResumeOptions(hollow=True, ready=True), Progress())
    with pytest.raises(InvalidOption, match="only where its contexts are"):
        resume(node, target.pid, ResumeOptions("1", ready=True), Progress())
    resume(node, target.pid, READY, Progress())
    with pytest.raises(Busy, match="on its GPUs already"):
        resume(node, target.pid, READY, Progress())
    with pytest.raises(NotAuthorized):
        suspend(node, target.pid, SuspendOptions(hollow=True, caller=12345), Progress())
    assert level(node, target) == "ready"

    def fails(*_: object) -> None:
        raise Busy("the GPU is locked")

    with monkeypatch.context() as patch:
        patch.setattr(node.gpu_locks, "locked", fails)
        with pytest.raises(Busy, match="is locked"):
            resume(node, target.pid, ResumeOptions(), Progress())
    assert level(node, target) == "hollow" and free(node, 0) == before
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


def test_the_engine_is_killed(place: Path, start: Starter, undisturbed: Undisturbed) -> None:
    """At each step, and when it is ready: then it is hollow, and is resumed."""
    config = NodeConfig(place / "state", place / "run")
    target = start("shared_pair")
    target.wait_for_steps(3)
    for point in ("ready-load", "ready-keep"):
        with Node(config) as node:
            suspend(node, target.pid, HOLLOW, Progress())
        killed_at(point, "resume", "ResumeOptions(ready=True)", place, target.pid)
        with Node(config) as node:
            settle(node, [])
            assert level(node, target) == "hollow"
            resume(node, target.pid, READY, Progress())
        with Node(config) as node:
            settle(node, [])
            assert level(node, target) == "hollow"
            resume(node, target.pid, ResumeOptions(), Progress())
            assert not left_parked(config.runtime_dir)
            computes_right(target, undisturbed)
