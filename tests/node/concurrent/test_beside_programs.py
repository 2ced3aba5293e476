"""No kernel of a mover runs beside a program that the driver has restored once: a GPU does not
interrupt such a program's kernels, and ends the program if one waits for another (hazard 47).
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.digest import KERNEL
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, bring_back, check
from tests.node.concurrent.conftest import Undisturbed
from tests.node.concurrent.watch import Watch, braked_movers
from tests.support.harness import Target

ITERATIONS = 16
"""Steps that a program makes while it is copied; it writes all its memory in fewer."""
DEVICE_MEMORY = range(0x6F00_0000_0000, 0x7000_0000_0000)


@pytest.fixture
def target(start: Starter) -> Target:
    """A program whose own work is in no trace."""
    target = start("single")
    target.wait_for_steps(5)
    return target


@pytest.fixture
def trace(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What movers do from now on."""
    path = tmp_path / "trace"
    path.touch()
    monkeypatch.setenv("PHOS_SOFTGPU_TRACE", str(path))
    return path


def work(trace: Path) -> Iterator[dict[str, Any]]:
    """The movers' work that takes a GPU's multiprocessors: kernels, and copies within the GPU."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    movers = {line["pid"] for line in lines if line.get("kernel") == KERNEL}
    for line in lines:
        within_device = within(line["read"]) and within(line["written"])
        if line["pid"] in movers and (line["kind"] == "kernel" or within_device):
            yield line


def within(ranges: list[list[int]]) -> bool:
    """Whether ranges of a line of the trace are in device memory."""
    return any(begin in DEVICE_MEMORY for begin, _ in ranges)


def stops(progress: Progress) -> Iterator[tuple[float, float]]:
    """When the gates were closed, from the end of coming to rest."""
    for stopped, phases in itertools.groupby(progress.phases, lambda phase: phase.stopped):
        if stopped:
            first, *_, last = phases
            yield first.end or 0, last.end or 0


def beside(trace: Path, progress: Progress) -> list[dict[str, Any]]:
    """What of it began in this job while the gates were open."""
    began, ended = progress.phases[0].start, progress.phases[-1].end or 0
    closed = list(stops(progress))
    times = ((each, each["start"] / 1e9) for each in work(trace))
    return [
        each
        for each, at in times
        if began <= at <= ended and not any(begin <= at <= end for begin, end in closed)
    ]


@pytest.mark.parametrize("mode", ["recopy", "concurrent"])
def test_in_a_checkpoint(
    mode: str, node: Node, target: Target, trace: Path, undisturbed: Undisturbed
) -> None:
    first, second = Progress(), Progress()
    options = CheckpointOptions(mode=mode, fallback="none")
    checkpoint(node, target.pid, options, first)
    assert bool(beside(trace, first)) == (mode == "recopy"), "not yet restored, it may be hashed"
    target.more_steps(5)
    manifest = checkpoint(node, target.pid, options, second)
    assert beside(trace, second) == []
    assert any(work(trace)), "nothing was traced"
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, manifest.id), original, undisturbed("single"))


def test_in_a_checkpoint_of_what_was_restored(node: Node, target: Target, trace: Path) -> None:
    """The image remembers that the driver's checkpoint came before it."""
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    target.kill()
    bring_back(node, target, image.id)
    progress = Progress()
    checkpoint(node, target.pid, CheckpointOptions(mode="recopy", fallback="none"), progress)
    assert beside(trace, progress) == []


def test_after_a_wrong_guess(node: Node, start: Starter, trace: Path) -> None:
    """The driver restored the program in the attempt that guessed wrong."""
    guilty = start("wrong", "chase")
    guilty.wait_for_steps(5)
    for _ in range(5):
        with braked_movers(node, guilty, ITERATIONS) as brake:
            watch = Watch(node, guilty, brake)
            manifest = watch.checkpoint(CheckpointOptions(mode="concurrent"))
        if manifest.wrong_guesses:
            break
    assert (manifest.mode, manifest.wrong_guesses) == ("recopy", 1)
    assert len(list(stops(watch.progress))) == 2
    assert beside(trace, watch.progress) == []


def test_in_a_migration(node: Node, target: Target, trace: Path) -> None:
    first, second = Progress(), Progress()
    migrate(node, target.pid, MigrateOptions("1"), first)
    assert beside(trace, first)
    target.more_steps(5)
    migrate(node, target.pid, MigrateOptions("0"), second)
    assert [each for each in beside(trace, second) if each["kind"] == "kernel"] == []
    target.more_steps(AFTER)
