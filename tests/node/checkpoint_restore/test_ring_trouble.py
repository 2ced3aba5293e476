"""Trouble among four ranks whose kernels wait for each other: none hangs, harms the others, or
leaves anything behind; and the error says which rank it is, and what to do.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations import move_checks
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.rescue import bring_back as recover
from phosd.engine.system import cgroups, cuda, stopped_state
from phosd.errors import Busy, NotAuthorized, OutOfMemory, PhosError, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    REST,
    Undisturbed,
    all_compute_right,
    bring_back,
    check,
    computes_right,
    save,
)
from tests.node.checkpoint_restore.test_trouble import PHASES, at_phase, soon
from tests.support.gpu_memory import taken
from tests.support.harness import Target, alive, children, halt, wait_until

NOBODY = 65534
RANKS = 4
IN_A_MOVE = [
    *((suspend, SuspendOptions(deadline=REST), phase) for phase in ("quiesce", "park", "control")),
    *(
        (migrate, MigrateOptions("0:1,1:0", deadline=REST), phase)
        for phase in ("park", "control", "unpark")
    ),
]
ENGINE = """
import pathlib, sys
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.restore.restore import RestoreOptions, restore
place = pathlib.Path(sys.argv[1])
with Node(NodeConfig(place / "state", place / "run")) as node:
    restore(node, sys.argv[2], RestoreOptions(), Progress())
"""

pytestmark = pytest.mark.usefixtures("two_gpus")


@pytest.fixture
def ring(start: Starter) -> Target:
    target = start("ring")
    target.wait_for_steps(3)
    return target


def apart(start: Starter, word: str) -> tuple[Target, int, int]:
    """Ranks that are trees of their own, the last of them what ``word`` says; and the pids of the
    first and of the last.
    """
    target = start("ring", arguments=("0", "apart", word))
    target.wait_for_steps(3)
    ranks = children(target.pid)
    return target, min(ranks), max(ranks)


def refused(node: Node, pid: int, error: type[PhosError], match: str, caller: int = 0) -> None:
    """The checkpoint is refused, and nothing has stood still."""
    progress = Progress()
    with pytest.raises(error, match=match) as raised:
        checkpoint(node, pid, CheckpointOptions(caller=caller, deadline=REST), progress)
    assert raised.value.hint
    assert not any(phase.stopped for phase in progress.phases)
    assert node.store.list() == []


def stands_still_in(
    phase: str,
    last: int,
    act: Callable[[Progress], object],
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[[int], object] = halt,
    told: tuple[str, str] = ("is stopped, by a signal", "kill -CONT"),
) -> None:
    """The rank is stopped as the phase begins: the job ends soon, and says who is stopped."""
    state, way_out = told
    monkeypatch.setattr(stopped_state, "TIMEOUT", 0.3)
    with (
        soon() as begins,
        pytest.raises(PhosError, match=f"process {last} {state}") as raised,
    ):
        act(at_phase(phase, begins(lambda: stop(last))))
    assert way_out in raised.value.hint


def goes_on_right(
    node: Node, ring: Target, last: int, undisturbed: Undisturbed, *, filled: bool = True
) -> None:
    """The other ranks are back already; the last one is when it was continued and recovered, on
    GPUs that others have ``filled`` meanwhile.
    """
    for rank in {ring.pid, *children(ring.pid)} - {last}:
        with HookLink(rank, node.config.runtime_dir) as link:
            assert link.hello().state is HookState.RUNNING
    with taken() if filled else nullcontext():
        os.kill(last, signal.SIGCONT)
        assert not recover(last, node.config.runtime_dir).failures
    assert not left_parked(node.config.runtime_dir)
    computes_right(ring, undisturbed)


@pytest.mark.rotated(of=4)
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_is_stopped_in_a_checkpoint(
    phase: str,
    node: Node,
    ring: Target,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = max(children(ring.pid))
    options = CheckpointOptions(mode="stop", deadline=REST)
    stands_still_in(phase, last, partial(checkpoint, node, ring.pid, options), monkeypatch)
    assert node.store.list() == []
    goes_on_right(node, ring, last, undisturbed)
    save(node, ring, "stop")


@pytest.fixture
def cgroup(place: Path) -> Iterator[Path]:
    """A cgroup, which may be frozen; what is in it goes back to where this process is."""
    where = cgroups.memberships(os.getpid())[cgroups.UNIFIED]
    home = cgroups.folder(cgroups.UNIFIED, where)
    assert home is not None
    folder = home / f"phos-test-{place.name}"
    folder.mkdir()
    yield folder
    (folder / "cgroup.freeze").write_text("0")
    for pid in (folder / "cgroup.procs").read_text().split():
        (home / "cgroup.procs").write_text(pid)
    folder.rmdir()


@pytest.mark.rotated(of=4)
@pytest.mark.parametrize("phase", ["prepare", "quiesce", "park", "control", "unpark"])
def test_a_rank_is_frozen_in_a_checkpoint(
    phase: str,
    cgroup: Path,
    node: Node,
    ring: Target,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a container is paused. The kernel says that such a process sleeps."""
    last = max(children(ring.pid))

    def freeze(pid: int) -> None:
        (cgroup / "cgroup.procs").write_text(str(pid))
        (cgroup / "cgroup.freeze").write_text("1")
        frozen = partial((cgroup / "cgroup.events").read_text)
        wait_until(lambda: "frozen 1" in frozen(), "the rank to be frozen")

    act = partial(checkpoint, node, ring.pid, CheckpointOptions(mode="stop", deadline=REST))
    told = (f"is frozen, with its cgroup .*{cgroup.name}", "thaw")
    stands_still_in(phase, last, act, monkeypatch, freeze, told)
    assert node.store.list() == []
    (cgroup / "cgroup.freeze").write_text("0")
    goes_on_right(node, ring, last, undisturbed)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("step", ["Lock", "Checkpoint", "Restore"])
def test_a_rank_is_stopped_in_the_middle_of_a_step_of_the_driver(
    step: str,
    node: Node,
    ring: Target,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver waits for it for ever, and does the step when it goes on; then the other two need
    device memory.
    """
    last = max(children(ring.pid))
    monkeypatch.setattr(stopped_state, "TIMEOUT", 0.3)
    with (
        soon() as begins,
        pytest.raises(PhosError, match=f"process {last} is stopped, by"),
        monkeypatch.context() as patch,
    ):
        stop, stopped = begins(lambda: halt(last)), threading.Event()

        def call(name: str, *arguments: Any, about: str = "") -> Any:
            asked = name == f"cuCheckpointProcess{step}" and arguments[0] == last
            if asked and not stopped.is_set():
                stopped.set()
                stop(Progress())
            return cuda.call(name, *arguments, about=about)

        patch.setattr("phosd.engine.program.driver_checkpoint.call", call)
        checkpoint(node, ring.pid, CheckpointOptions(mode="stop", deadline=REST), Progress())
    goes_on_right(node, ring, last, undisturbed, filled=step == "Lock")
    save(node, ring, "stop")


def test_a_process_is_stopped_as_its_state_is_asked(
    start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CRIU leaves it, which lets go of a stopped process a moment before it stops again. Nobody
    waits for it, and nobody thinks that it will do something when it goes on.
    """
    target = start("single")
    target.wait_for_steps(3)
    monkeypatch.setattr(stopped_state, "TIMEOUT", 0.3)
    bindings = cuda.driver()
    get_state = bindings.cuCheckpointProcessGetState
    with soon() as begins, monkeypatch.context() as patch:
        stop = begins(lambda: halt(target.pid))

        def stopped(pid: int) -> Any:
            stop(Progress())
            return get_state(pid)

        patch.setattr(bindings, "cuCheckpointProcessGetState", stopped)
        with pytest.raises(Busy, match=f"process {target.pid} is stopped, by"):
            driver_checkpoint.require_running([target.pid])
    assert not stopped_state.is_asked(target.pid)
    os.kill(target.pid, signal.SIGCONT)
    driver_checkpoint.require_running([target.pid])
    computes_right(target, undisturbed)


@pytest.mark.rotated(of=4)
@pytest.mark.parametrize(
    ("act", "options", "phase"), IN_A_MOVE, ids=[f"{a.__name__}-{p}" for a, _, p in IN_A_MOVE]
)
def test_a_rank_is_stopped_in_a_move(
    act: Callable[..., object],
    options: SuspendOptions | MigrateOptions,
    phase: str,
    node: Node,
    ring: Target,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = max(children(ring.pid))
    stands_still_in(phase, last, partial(act, node, ring.pid, options), monkeypatch)
    assert not node.suspended.all()
    goes_on_right(node, ring, last, undisturbed)
    migrate(node, ring.pid, MigrateOptions("0:1,1:0", deadline=REST), Progress())
    computes_right(ring, undisturbed)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("phase", ["load", "control", "map"])
def test_a_rank_is_stopped_in_a_resumption(
    phase: str,
    node: Node,
    ring: Target,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All stay suspended, until another attempt."""
    last = max(children(ring.pid))
    suspend(node, ring.pid, SuspendOptions(deadline=REST), Progress())
    act = partial(resume, node, ring.pid, ResumeOptions())
    stands_still_in(phase, last, act, monkeypatch)
    os.kill(last, signal.SIGCONT)
    assert [each.pid for each in node.suspended.all()] == [ring.pid]
    act(Progress())
    computes_right(ring, undisturbed)


@pytest.mark.rotated(of=6)
@pytest.mark.parametrize("phase", ["prepare", "quiesce", "park", "control", "cpu", "unpark"])
@pytest.mark.parametrize("mode", ["concurrent", "stop"])
def test_another_program_fills_the_gpus(
    mode: str, phase: str, node: Node, ring: Target, undisturbed: Undisturbed
) -> None:
    """Movers that have been there before have room for what the driver needs of all ranks."""
    save(node, ring, mode)
    options = CheckpointOptions(mode=mode, deadline=REST)
    with ExitStack() as filled, soon() as begins:
        fill = begins(lambda: filled.enter_context(taken()))
        checkpoint(node, ring.pid, options, at_phase(phase, fill))
        ring.more_steps(2)
    computes_right(ring, undisturbed)


def test_another_program_fills_the_gpus_of_a_restore(
    node: Node, ring: Target, undisturbed: Undisturbed
) -> None:
    """Nothing is left of it, or it is there."""
    image = save(node, ring, "stop").id
    ring.more_steps(AFTER)
    ring.kill()
    original = ring.values()
    for phase in ("admission", "load", "cpu", "control"):
        with (
            ExitStack() as filled,
            soon() as begins,
            pytest.raises(OutOfMemory, match=r"GPU \d has|a block of|process \d") as raised,
        ):
            fill = begins(partial(filled.enter_context, taken()))
            restore(node, image, RestoreOptions(), at_phase(phase, fill))
        assert raised.value.hint
        assert not any(map(alive, ring.pids))
    check(bring_back(node, ring, image), original, undisturbed("ring"))


def test_two_jobs_on_the_same_gpus(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Both are saved at the same time, and one is restored while the other runs. On a GPU that says
    who else uses it, they are refused (test_alone.py).
    """
    rings = start("ring"), start("ring")
    for each in rings:
        each.wait_for_steps(3)
    with ThreadPoolExecutor(2) as both:
        images = [*both.map(lambda each: save(node, each, "concurrent").id, rings)]
    first, other = rings
    first.more_steps(AFTER)
    first.kill()
    original = first.values()
    check(bring_back(node, first, images[0]), original, undisturbed("ring"))
    save(node, other, "stop")
    all_compute_right(undisturbed, *rings)


def test_access_that_was_revoked(
    place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """By an owner, by peers, and by unmapping: so it is after a checkpoint, and a restore. The
    ranks look, and end if it is not.
    """
    hold = place / "hold"
    hold.touch()
    ring = start("ring", arguments=("0", "revoked"))

    def revoked() -> bool:
        return ring.log.read_text().count("has no access\n") == RANKS

    wait_until(revoked, "all ranks to have no access")
    for mode in ("concurrent", "stop"):
        image = save(node, ring, mode).id
    ring.kill()
    restore(node, image, RestoreOptions(), Progress())
    hold.unlink()
    wait_until(lambda: len(ring.values()) > AFTER, "the ranks to go on")
    computes_right(ring, undisturbed)


def test_a_rank_of_another_user(
    node: Node, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """Only root may save any of them, and has what is saved."""
    place.chmod(0o755)
    ring, first, last = apart(start, "user")
    refused(node, first, NotAuthorized, f"uid {NOBODY} may not save .* {first}", NOBODY)
    refused(node, last, NotAuthorized, f"uid {NOBODY} may not save .* belongs to uid 0", NOBODY)
    theirs = SuspendOptions(caller=NOBODY, deadline=REST)
    with pytest.raises(NotAuthorized, match="belongs to uid 0"):
        suspend(node, last, theirs, Progress())
    computes_right(ring, undisturbed)
    assert suspend(node, last, SuspendOptions(deadline=REST), Progress()).owner == 0
    with pytest.raises(NotAuthorized, match=f"not to {NOBODY}"):
        resume(node, last, ResumeOptions(caller=NOBODY), Progress())
    resume(node, last, ResumeOptions(), Progress())
    computes_right(ring, undisturbed)


def test_a_rank_without_the_hook(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tree it is seen; outside of it, NVML tells, which the software GPU does not have."""
    ring = start("ring", arguments=("0", "bare"))
    ring.wait_for_steps(3)
    (last,) = (pid for pid in children(ring.pid) if b"last" in _words(pid))
    refused(node, ring.pid, Unsupported, f"shares device memory|process {last} runs without")
    with pytest.raises(Unsupported, match=f"process {last} runs without the hook"):
        checkpoint(node, ring.pid, CheckpointOptions(mode="stop", deadline=REST), Progress())
    computes_right(ring, undisturbed)
    ring.kill()
    ring, first, last = apart(start, "bare")
    users = dict.fromkeys(children(ring.pid), 0)
    monkeypatch.setattr(move_checks, "users_of", lambda gpus: users)
    refused(node, first, Unsupported, rf"pid {last} .* uses GPU 0, too")
    computes_right(ring, undisturbed)


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def test_a_rank_in_a_container(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    ring, first, last = apart(start, "boxed")
    for each in (first, last):
        refused(node, each, Unsupported, rf"pid {last} .* container or sandbox \(its own mnt")
    computes_right(ring, undisturbed)


def test_a_gpu_is_missing_or_counted_otherwise(
    place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """A restore tells which is missing. How anybody counts them does not matter."""
    ring = start("ring", extra={"CUDA_VISIBLE_DEVICES": "1,0"})
    ring.wait_for_steps(3)
    config = NodeConfig(place / "state", place / "run")
    with Node(config) as node:
        image = save(node, ring, "stop")
    ring.more_steps(AFTER)
    ring.kill()
    original = ring.values()

    def bring(visible: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", ENGINE, str(place), image.id]
        surroundings = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
        return subprocess.run(command, env=surroundings, capture_output=True, text=True)

    for visible in ("0", "1"):
        done = bring(visible)
        assert done.returncode == 1
        assert re.search("GpuMismatch: .* needs 2 GPUs .*; here is 0 ", done.stderr), done.stderr
        assert not any(map(alive, ring.pids))
    mark = ring.position()
    done = bring("1,0")
    assert done.returncode == 0, done.stderr
    check(ring.wait_for_steps(AFTER, since=mark), original, undisturbed("ring"))
