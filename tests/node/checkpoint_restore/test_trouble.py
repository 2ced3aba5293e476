"""Trouble in the middle of a job: the program goes on, or its death is told; no image is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from phosd.engine import faults
from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.rescue import bring_back as recover
from phosd.errors import (
    Busy,
    Cancelled,
    ImageCorrupt,
    NotAuthorized,
    OutOfSpace,
    PhosError,
    Timeout,
)
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
from tests.support.harness import Target, alive, wait_until
from tests.support.pids import occupy, release

PHASES = ("prepare", "quiesce", "digest", "drain", "park", "control", "cpu", "unpark")
"""The phases of a checkpoint in which the program must be there."""
SOON = 20.0
"""Seconds within which a job ends in which something has gone wrong, on a busy machine, too."""


def at_phase(name: str, action: Callable[[Progress], None]) -> Progress:
    """A progress that calls ``action`` once, when the phase begins."""
    done: list[bool] = []

    def observe(progress: Progress) -> None:
        if not done and progress.phases and progress.phases[-1].name == name:
            done.append(True)
            action(progress)

    return Progress(observer=observe)


@contextmanager
def soon() -> Iterator[Callable[[Callable[[], object]], Callable[[Progress], None]]]:
    """What is inside ends soon after something has happened: what it passes to the function that
    this yields, to have an action for :func:`at_phase`.
    """
    since: list[float] = []

    def begins(happens: Callable[[], object]) -> Callable[[Progress], None]:
        def act(_: Progress) -> None:
            happens()
            since.append(time.monotonic())

        return act

    yield begins
    took = time.monotonic() - since[0]
    assert took < SOON, f"it went on for {took:.1f} s"


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("phase", PHASES)
def test_the_target_dies(phase: str, node: Node, start: Starter) -> None:
    target = start("single")
    target.wait_for_steps(3)
    progress = at_phase(phase, lambda _: os.kill(target.pid, signal.SIGKILL))
    with pytest.raises(PhosError):
        checkpoint(node, target.pid, CheckpointOptions(mode="stop"), progress)
    wait_until(lambda: not alive(target.pid), "the end of the target")
    assert node.store.list() == []
    # Nothing of the dead job stands in the way of the next.
    other = start("workers")
    other.wait_for_steps(3)
    save(node, other, "stop")


def test_a_neighbour_does_not_take_the_room_of_a_stopped_program(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The driver's restore would fail for good without the memory that its checkpoint set free."""
    target = start("single")
    target.wait_for_steps(3)

    neighbours: list[Target] = []

    def take_everything(_: Progress) -> None:
        greedy = start("greedy", hooked=False)
        wait_until(lambda: b"took" in greedy.log.read_bytes(), "the neighbour to take the memory")
        neighbours.append(greedy)

    progress = at_phase("cpu", take_everything)
    checkpoint(node, target.pid, CheckpointOptions(mode="stop"), progress)
    target.more_steps(AFTER)
    (greedy,) = neighbours
    assert alive(greedy.pid)
    greedy.kill()
    computes_right(target, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("mode", ["stop", "driver"])
def test_a_job_is_cancelled_in_every_phase(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    whole = Progress()
    checkpoint(node, target.pid, CheckpointOptions(mode=mode), whole)
    published = len(node.store.list())
    for phase in (p.name for p in whole.phases):
        try:
            checkpoint(
                node, target.pid, CheckpointOptions(mode=mode), at_phase(phase, Progress.cancel)
            )
            published += 1  # too late to cancel: then it must be whole
        except Cancelled:
            pass
        assert len(node.store.list()) == published
        computes_right(target, undisturbed)
    assert published < len(whole.phases), "cancelling never had an effect"


@pytest.mark.parametrize("mode", ["concurrent", "stop"])
def test_the_hook_does_not_answer_when_memory_is_given_back(
    mode: str,
    place: Path,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The movers keep the only copy until somebody recovers the program, also when phosd ends."""

    def silent(*_: object) -> int:
        raise Timeout("the hook says nothing")

    target = start("single")
    target.wait_for_steps(3)
    with Node(NodeConfig(place / "state", place / "run")) as node:
        with monkeypatch.context() as patch:
            patch.setattr(HookLink, "unpark", silent)
            with pytest.raises(Timeout, match="says nothing"):
                checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress())
        with pytest.raises(Busy, match=f"phos recover {target.pid}"):
            checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress())
        node.processes()
    assert {pid for pid, _ in left_parked(place / "run")} == {target.pid}
    assert not recover(target.pid, place / "run").failures
    assert not left_parked(place / "run")
    computes_right(target, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("point", ["pack-create", "pack-sync", "manifest-write", "image-seal"])
def test_the_disk_fills_up(
    point: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    with monkeypatch.context() as patch:
        patch.setattr(faults, "_armed", faults.parse(f"{point}:enospc"))
        patch.setattr(faults, "_visits", {})
        with pytest.raises(OutOfSpace):
            checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    assert node.store.list() == []
    computes_right(target, undisturbed)
    run_cycle(node, target, "stop", undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 4 MiB."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "phos-test", str(tmp_path)], check=True
    )
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_small_disk_is_found_before_the_stop(
    small_disk: Path, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    with Node(NodeConfig(state_dir=small_disk, runtime_dir=place / "run")) as node:
        target = start("single")
        target.wait_for_steps(3)
        progress = Progress()
        with pytest.raises(OutOfSpace):
            checkpoint(node, target.pid, CheckpointOptions(mode="stop"), progress)
        assert progress.stop_seconds == 0
        computes_right(target, undisturbed)


def test_criu_is_missing(place: Path, start: Starter, undisturbed: Undisturbed) -> None:
    config = NodeConfig(place / "state", place / "run", criu=place / "no-criu")
    with Node(config) as node:
        target = start("single")
        target.wait_for_steps(3)
        with pytest.raises(PhosError, match="no-criu"):
            checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
        computes_right(target, undisturbed)


def test_criu_fails(node: Node, place: Path, start: Starter, undisturbed: Undisturbed) -> None:
    """Its own last error lines are shown. The stand-in works until it is told to fail."""
    sign, broken = place / "fail", place / "criu"
    broken.write_text(
        "#!/bin/sh\n"
        f'if [ -e {sign} ]; then echo "Error (planned.c:1): out of luck" >&2; exit 1; fi\n'
        f'exec {node.criu.path} "$@"\n'
    )
    broken.chmod(0o755)
    with Node(NodeConfig(place / "other", place / "run", criu=broken)) as failing:
        target = start("single")
        target.wait_for_steps(3)
        image = save(failing, target, "stop").id
        sign.touch()
        with pytest.raises(PhosError, match="out of luck"):
            checkpoint(failing, target.pid, CheckpointOptions(mode="stop"), Progress())
        assert [m.id for m in failing.store.list()] == [image]
        computes_right(target, undisturbed)
        target.more_steps(AFTER)
        target.kill()
        with pytest.raises(PhosError, match="out of luck"):
            restore(failing, image, RestoreOptions(), Progress())
        sign.unlink()
        original = target.values()
        check(bring_back(failing, target, image), original, undisturbed("single"))


@pytest.mark.parametrize(
    ("harm", "error"),
    [(Path.unlink, ImageCorrupt), (partial(os.chown, uid=12345, gid=0), NotAuthorized)],
    ids=["gone", "a user's"],
)
def test_what_could_not_be_restored_is_not_published(
    harm: Callable[[Path], None],
    error: type[PhosError],
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
) -> None:
    """Files of the image are not as they must be for a restore, whatever the reason."""
    target = start("single")
    target.wait_for_steps(3)

    def spoil(_: Progress) -> None:
        (file,) = node.store.disk.images.glob("*/criu-0/inventory.img")
        harm(file)

    with pytest.raises(error):
        checkpoint(node, target.pid, CheckpointOptions(), at_phase("publish", spoil))
    assert node.store.list() == []
    computes_right(target, undisturbed)
    save(node, target, "stop")


def test_the_original_still_runs(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("single")
    target.wait_for_steps(3)
    image = save(node, target, "stop").id
    with pytest.raises(PhosError, match=str(target.pid)):
        restore(node, image, RestoreOptions(), Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("which", ["pid", "thread id"])
def test_an_id_is_taken(which: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """The error says who holds it; when the holder is gone, the restore succeeds."""
    target = start("single")
    target.wait_for_steps(3)
    image = save(node, target, "stop").id
    threads = sorted(int(t.name) for t in Path(f"/proc/{target.pid}/task").iterdir())
    wanted = target.pid if which == "pid" else threads[-1]
    assert which == "pid" or wanted != target.pid
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    holder = occupy(wanted)
    try:
        with pytest.raises(PhosError, match=f"{wanted}.*sleep"):
            restore(node, image, RestoreOptions(), Progress())
    finally:
        release(holder)
    check(bring_back(node, target, image), original, undisturbed("single"))


def test_the_engine_dies_while_the_program_stands_still(
    place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Before anything is parked, a lost client opens the gate by itself."""
    target = start("single")
    target.wait_for_steps(3)
    closer = (
        "import os, sys, pathlib\n"
        "from phosd.engine.hook_client.link import HookLink\n"
        "link = HookLink(int(sys.argv[1]), pathlib.Path(sys.argv[2])).connect()\n"
        "while not link.close_gate(10.0).settled: pass\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", closer, str(target.pid), str(place / "run")])
    assert done.returncode == -signal.SIGKILL
    computes_right(target, undisturbed)
