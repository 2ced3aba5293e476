"""Programs that do not run on once they are saved: they end, or are held until told to go on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.faults import Point
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.recovery.startup import settle
from phosd.engine.recovery.stranded import stranded
from phosd.engine.system import memory_mount, procfs
from phosd.errors import Busy, Cancelled, InvalidOption, NoSuchProcess, PhosError
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, computes_right
from tests.node.checkpoint_restore.test_fault_points import armed
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.device_files import mapped, pretend
from tests.support.harness import Target, alive, children, halt, parse, wait_until

END = CheckpointOptions(then="end")
HOLD = CheckpointOptions(then="hold")
BEATING = """
import runpy, sys, threading, time
def beat():
    with open("beats.log", "a") as file:
        for number in range(10**9):
            print(number, "beat", file=file, flush=True)
            time.sleep(0.001)
threading.Thread(target=beat, daemon=True).start()
sys.argv.pop(0)
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program with a thread that counts in a file, and never meets a gate."""
ENGINE = """
import sys, pathlib
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
from phosd.engine.operations.checkpoint import *
place = pathlib.Path(sys.argv[1])
node = Node(NodeConfig(place / "state", place / "run"))
checkpoint(node, int(sys.argv[2]), CheckpointOptions(then="end"), Progress())
"""
STEPS = (
    Point.CHECKPOINT_CPU,
    Point.CHECKPOINT_PERSIST,
    Point.CHECKPOINT_PUBLISH,
    Point.STANDING_END,
)


@pytest.fixture
def beating(start: Starter, request: pytest.FixtureRequest) -> Target:
    target = start("single", hooked=request.param, interpreter=(sys.executable, "-c", BEATING))
    target.wait_for_steps(3)
    return target


def states(pid: int) -> set[str]:
    found = map(procfs.stat, procfs.threads(pid))
    return {thread.state for thread in found if thread is not None}


def counted_on(log: Path, last: int) -> None:
    wait_until(lambda: max(parse(log.read_bytes())) > last + 5, "its thread to count")


def runs_on(node: Node, target: Target, undisturbed: Undisturbed) -> None:
    """Nothing is left of a job that stopped it."""
    assert not node.stopped.living()
    assert not [each for each in stranded(node.config.runtime_dir) if each.pid == target.pid]
    computes_right(target, undisturbed)


@pytest.mark.parametrize("beating", [True, False], ids=["hooked", "driver"], indirect=True)
def test_it_ends_and_nothing_is_done_twice(
    beating: Target, node: Node, undisturbed: Undisturbed
) -> None:
    log = beating.log.with_name("beats.log")
    for _ in range(2):
        image = checkpoint(node, beating.pid, END, Progress())
        assert not alive(beating.pid)
        assert image.mode == ("stop" if image.processes[0].hooked else "driver")
        verify(node.store, image.id, Progress())
        assert node.store.list()[-1].id == image.id
        before, beats = beating.values(), parse(log.read_bytes())
        beating.kill()  # its pid becomes free
        at = beating.position()
        assert restore(node, image.id, RestoreOptions(), Progress()).pid == beating.pid
        after = beating.wait_for_steps(AFTER, since=at)
        assert not before.keys() & after.keys(), "steps were computed twice"
        assert sorted(before | after) == list(range(max(after) + 1))
        counted_on(log, max(beats))
        lines = [line for line in log.read_text().split("\n")[:-1] if line]
        assert [int(line.split()[0]) for line in lines] == [*range(len(lines))]
    runs_on(node, beating, undisturbed)


@pytest.mark.parametrize("beating", [True, False], ids=["hooked", "driver"], indirect=True)
def test_it_is_held(beating: Target, node: Node, undisturbed: Undisturbed) -> None:
    log = beating.log.with_name("beats.log")
    progress = Progress()
    job = threading.Thread(target=checkpoint, args=(node, beating.pid, HOLD, progress))
    job.start()
    wait_until(lambda: progress.holding, "the job to hold the program")
    assert states(beating.pid) == {"T"}
    still, steps = log.stat().st_size, beating.position()
    verify(node.store, progress.result, Progress())
    with pytest.raises(Busy):
        checkpoint(node, beating.pid, HOLD, Progress())
    assert (log.stat().st_size, beating.position()) == (still, steps)
    progress.go_on()
    job.join()
    runs_on(node, beating, undisturbed)


@pytest.mark.parametrize("program", ["workers", "shared_pair", "inheritors"])
def test_several_processes_end(
    program: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
) -> None:
    pretend(place, monkeypatch)
    target = start(program)
    target.wait_for_steps(3)
    image = None
    while image is None:
        below = children(target.pid)
        assert below
        try:
            image = checkpoint(node, target.pid, END, Progress())
        except Busy as error:  # it was replacing a worker: who asks is to try again
            assert "during the checkpoint" in str(error)
            target.more_steps(2)
    assert not any(map(alive, (target.pid, *below)))
    before = target.values()
    target.kill()
    mark = target.position()
    restore(node, image.id, RestoreOptions(), Progress())
    after = target.wait_for_steps(AFTER, since=mark)
    assert not before.keys() & after.keys()
    runs_on(node, target, undisturbed)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("options", [END, HOLD], ids=["end", "hold"])
@pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "driver"])
def test_a_step_fails(
    options: CheckpointOptions,
    hooked: bool,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
) -> None:
    """It goes on. What was published stays."""
    target = start("single", hooked=hooked)
    target.wait_for_steps(3)
    last = Point.STANDING_HOLD if options is HOLD else Point.STANDING_END
    for step in (*STEPS[:-1], last):
        progress = Progress()
        with armed(f"{step}:raise"), pytest.raises(PhosError, match="fault point") as raised:
            checkpoint(node, target.pid, options, progress)
        made = [f"image {progress.result} is complete"] if progress.result else []
        assert getattr(raised.value, "__notes__", []) == made
        runs_on(node, target, undisturbed)
    for image in node.store.list():
        verify(node.store, image.id, Progress())


def test_it_is_cancelled(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Before it ends, and while it is held: it goes on."""
    target = start("single")
    target.wait_for_steps(3)
    with pytest.raises(Cancelled) as raised:
        checkpoint(node, target.pid, END, at_phase("publish", Progress.cancel))
    assert raised.value.__notes__ == [f"image {node.store.list()[-1].id} is complete"]
    runs_on(node, target, undisturbed)
    held = at_phase("hold", Progress.cancel)
    checkpoint(node, target.pid, HOLD, held)
    runs_on(node, target, undisturbed)


def test_it_is_killed_while_it_is_held(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Its image is what is left."""
    target = start("single")
    target.wait_for_steps(3)
    progress = at_phase("hold", lambda _: os.kill(target.pid, signal.SIGKILL))
    threading.Timer(1.0, progress.go_on).start()
    with pytest.raises(NoSuchProcess, match=f"process {target.pid} ended") as raised:
        checkpoint(node, target.pid, HOLD, progress)
    assert f"image {progress.result} is complete" in str(raised.value)
    assert "nothing was saved" not in str(raised.value)
    target.kill()
    restore(node, progress.result, RestoreOptions(), Progress())
    runs_on(node, target, undisturbed)


def test_who_comes_next_has_the_whole_gpu(node: Node, start: Starter) -> None:
    mover = node.movers.mover(0)
    free = mover.free_memory()[0]
    target = start("single")
    target.wait_for_steps(3)
    left = mover.free_memory()[0]  # what an earlier test has left may be free by now, too
    checkpoint(node, target.pid, END, Progress())
    wait_until(lambda: mover.free_memory()[0] >= max(free, left + 1), "its memory to be free")


@pytest.mark.parametrize("step", STEPS)
def test_the_engine_is_killed(
    step: Point, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """The next one finds it stopped, or just let go, and it runs on."""
    target = start("single")
    target.wait_for_steps(3)
    with (place / "engine.log").open("ab") as said:  # not a pipe: its movers would keep it open
        done = subprocess.run(
            [sys.executable, "-c", ENGINE, str(place), str(target.pid)],
            env=os.environ | {"PHOS_FAULT": f"{step}:1:kill"},
            stderr=said,
            timeout=60,
        )
    assert done.returncode == -signal.SIGKILL, (place / "engine.log").read_text()
    stopped = step not in (Point.CHECKPOINT_CPU,)
    with Node(NodeConfig(place / "state", place / "run")) as node:
        assert [each.pid for each in node.stopped.living()] == [target.pid] * stopped
        if step is Point.STANDING_END:
            (told,) = [e for e in stranded(place / "run") if e.pid == target.pid]
            assert "stopped by phosd" in told.why
            account = bring_back(target.pid, place / "run")
            assert not account.failures
            assert "was stopped for its image and" in account.text([target.pid])
        settle(node, [])
        runs_on(node, target, undisturbed)


def test_its_user_had_stopped_a_process(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """It could not be told from those that are stopped for the image."""
    target = start("inheritors")
    target.wait_for_steps(3)
    idle = min(children(target.pid))
    halt(idle)
    with pytest.raises(Busy, match=f"process {idle} .*is stopped, by a signal"):
        checkpoint(node, target.pid, END, Progress())
    assert states(idle) == {"T"}
    os.kill(idle, signal.SIGCONT)
    runs_on(node, target, undisturbed)


def test_a_child_that_uses_the_gpu_after_all(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
) -> None:
    """Nobody who stands still tells the driver of it; the devices that it has open do."""
    device = pretend(place, monkeypatch)
    told = place / "told"
    target = start("latecomer", arguments=("0", str(told)))
    target.wait_for_steps(3)
    (child,) = children(target.pid)

    def meanwhile(progress: Progress) -> None:
        phase = progress.phases[-1].name if progress.phases else ""
        if phase == "cpu" and alive(child) and not mapped(child, device):
            whole = told.with_suffix(".whole")
            whole.write_text("")
            whole.rename(told)
            wait_until(lambda: not told.exists(), "the child to use the GPU")

    with pytest.raises(Busy, match=f"{child} (.* )?began to use the GPU"):
        checkpoint(node, target.pid, END, Progress(observer=meanwhile))
    assert node.store.list() == []
    runs_on(node, target, undisturbed)
    image = checkpoint(node, target.pid, END, Progress())
    assert sum(process.gpu for process in image.processes) == 2
    assert not alive(target.pid) and not alive(child)


@pytest.fixture
def with_memory(place: Path) -> Iterator[Node]:
    config = NodeConfig(state_dir=place / "state", runtime_dir=place / "run", memory_tier=4 << 30)
    with Node(config) as made:
        yield made
    while config.memory_tier_dir.is_mount():
        assert memory_mount.unmount(config.memory_tier_dir) == ""


def test_it_ends_when_its_image_is_on_the_disk(
    with_memory: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    node = with_memory
    target = start("single")
    target.wait_for_steps(3)
    durable: list[bool] = []

    def look(progress: Progress) -> None:
        durable.append(node.store.is_durable(progress.result))

    with (
        armed(f"{Point.WRITE_BACK_MANIFEST}:raise"),
        pytest.raises(PhosError, match="fault point") as raised,
    ):
        checkpoint(node, target.pid, END, Progress())
    # The image is whole in memory, and was not written to the disk.
    assert raised.value.__notes__ == [f"image {node.store.list()[-1].id} is complete"]
    runs_on(node, target, undisturbed)
    progress = at_phase("end", look)
    checkpoint(node, target.pid, END, progress)
    assert durable == [True]
    assert all(phase.stopped for phase in progress.phases if phase.name == "write")


def test_it_ends_when_its_image_is_in_memory(
    with_memory: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    node = with_memory
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(then="end", in_memory=True), Progress())
    assert not alive(target.pid) and not node.store.is_durable(image.id)
    target.kill()
    restore(node, image.id, RestoreOptions(), Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize(
    "options",
    [
        CheckpointOptions(mode="concurrent", then="end"),
        CheckpointOptions(mode="recopy", then="hold"),
        CheckpointOptions(in_memory=True),
        CheckpointOptions(then="hold", in_memory=True),
        CheckpointOptions(then="end", in_memory=True, durable=True),
    ],
)
def test_options_that_exclude_each_other(options: CheckpointOptions) -> None:
    with pytest.raises(InvalidOption):
        options.require_possible()
