"""Checkpoints for which PyTorch gives back what it keeps cached: what that saves, and what happens
where it cannot be.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.hook_client.link import HookLink, ReleaseState
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations import torch_cache
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.torch_cache import TIMEOUT
from phosd.engine.system.native import softgpu_folder
from phosd.errors import InvalidOption
from phosd.units import human_bytes
from tests.node.checkpoint_restore.cycle import AFTER, bring_back, check, computed_right
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.watch import watched
from tests.support import harness
from tests.support.harness import Target, environment, running, wait_until

CACHED = 8 * (4 << 20)
"""Bytes that the program keeps cached, in blocks of their own."""

EMPTIED = b"emptied\n"


def saved(manifest: Manifest) -> int:
    return sum(block.size for block in manifest.blocks)


def save(
    node: Node, target: Target, mode: str = "concurrent", *, release: bool = True
) -> tuple[Manifest, Progress]:
    """A checkpoint whose image was compared with the memory of the stop."""
    options = CheckpointOptions(mode=mode, fallback="none", release_cached=release)
    manifest, watch = watched(node, target, options)
    return manifest, watch.progress


def about_cache(progress: Progress) -> list[str]:
    return [note for note in progress.notes if "cached" in note]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is decides nothing."""
    monkeypatch.setattr(torch_cache, "TIMEOUT", harness.PATIENCE)


@pytest.mark.parametrize(
    ("mode", "snapshots"),
    [("concurrent", True), ("concurrent", False), ("recopy", False), ("stop", False)],
    ids=["snapshot", "on_write", "recopy", "stop"],
)
def test_cached_memory_is_not_saved(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("caching")
    target.wait_for_steps(5)
    before, progress = save(node, target, mode, release=False)
    assert about_cache(progress) == [] and progress.figures.released_bytes is None
    assert EMPTIED not in target.log.read_bytes(), "nobody has asked for it"
    manifest, progress = save(node, target, mode)
    assert saved(before) - saved(manifest) == CACHED
    assert about_cache(progress) == [
        f"PyTorch released {human_bytes(CACHED)} of cached device memory"
    ]
    assert progress.figures.released_bytes == CACHED
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, manifest.id), original, undisturbed("caching"))
    again, progress = save(node, target, mode)
    assert saved(again) == saved(manifest)
    assert about_cache(progress) == ["PyTorch released 0 B of cached device memory"]


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("plain", "it has not imported torch"),
        (
            "raises",
            "torch.cuda.empty_cache() raised RuntimeError('the cache \\x1b[31m is damaged')",
        ),
    ],
)
def test_why_nothing_was_released(
    variant: str, why: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("caching", variant)
    target.wait_for_steps(5)
    _, progress = save(node, target)
    expected = f"cached memory of process {target.pid} was not released: {why}"
    assert about_cache(progress) == [expected]
    assert progress.figures.released_bytes is None
    target.more_steps(2)
    target.kill()
    computed_right(target, undisturbed)
    assert target.errors.read_text() == ""


def test_a_main_thread_that_waits_in_c_is_not_waited_for(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call stays outstanding, the next checkpoint joins it, and the one after it asks anew."""
    target = start("caching", "waits")
    target.wait_for_steps(5)
    with monkeypatch.context() as patch:
        patch.setattr(torch_cache, "TIMEOUT", TIMEOUT)
        before, progress = save(node, target)
    (note,) = about_cache(progress)
    assert note.endswith("its main thread did not come to it within 2 s")
    prepare = progress.phases[0]
    assert prepare.end is not None and prepare.end - prepare.start >= TIMEOUT
    assert EMPTIED not in target.log.read_bytes()
    for times, released in ((1, CACHED), (2, 0)):
        with woken_when_asked(target, monkeypatch):
            manifest, progress = save(node, target)
        assert saved(before) - saved(manifest) == released
        assert progress.figures.released_bytes == released
        assert target.log.read_bytes().count(EMPTIED) == times
        before = manifest
    target.more_steps(2)
    target.kill()
    computed_right(target, undisturbed)


@contextmanager
def woken_when_asked(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the target's main thread is woken from its waiting whenever phosd looks whether it
    has come to what it was asked for.
    """

    def look(link: HookLink, *, ask: bool, until: float | None = None) -> ReleaseState:
        state = real(link, ask=ask, until=until)
        os.kill(target.pid, signal.SIGUSR1)
        return state

    real = HookLink.empty_cache
    with monkeypatch.context() as patch:
        patch.setattr(HookLink, "empty_cache", look)
        yield


def test_a_program_without_python(node: Node, place: Path) -> None:
    source = place / "plain.cpp"
    source.write_text(
        """
        #include <unistd.h>
        extern "C" int cuInit(unsigned), cuDevicePrimaryCtxRetain(void**, int),
            cuCtxSetCurrent(void*), cuMemAlloc_v2(unsigned long long*, unsigned long);
        int main() {
            void* context = nullptr;
            unsigned long long memory = 0;
            if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ||
                cuMemAlloc_v2(&memory, 4 << 20) || write(1, "ready\\n", 6) != 6)
                return 1;
            for (;;) pause();
        }
        """
    )
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the native build needs a C++ compiler, and so does this test"
    library = softgpu_folder() / "libcuda.so.1"
    subprocess.run([compiler, source, library, "-o", place / "plain"], check=True)
    log = place / "plain.log"
    with (
        log.open("wb") as out,
        running(
            [place / "plain"],
            env=environment(hooked=True, runtime=place / "run"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=place,
            start_new_session=True,
        ) as process,
    ):
        wait_until(lambda: log.read_bytes() == b"ready\n", "the program")
        progress = Progress()
        options = CheckpointOptions(release_cached=True)
        assert checkpoint(node, process.pid, options, progress).blocks
        (note,) = about_cache(progress)
        assert note.endswith("it ran no Python when it began to use CUDA")
        process.kill()


def test_the_processes_of_a_unit_are_asked_together(node: Node, start: Starter) -> None:
    target = start("shared_pair")
    target.wait_for_steps(5)
    progress = Progress()
    checkpoint(node, target.pid, CheckpointOptions(release_cached=True), progress)
    (note,) = about_cache(progress)
    assert note.count(",") == 1 and note.endswith("it has not imported torch")


def test_mode_driver_refuses(node: Node) -> None:
    options = CheckpointOptions(mode="driver", release_cached=True)
    with pytest.raises(InvalidOption, match="use another mode, or leave release_cached out"):
        checkpoint(node, os.getpid(), options, Progress())


def test_a_program_without_the_hook(
    node: Node, place: Path, start_plainly: Starter, surroundings: dict[str, str]
) -> None:
    target = start_plainly("caching", hooked=False, extra=surroundings)
    target.wait_for_steps(5)
    progress = Progress()
    assert checkpoint(node, target.pid, CheckpointOptions(release_cached=True), progress).mode == (
        "driver"
    )
    (note,) = about_cache(progress)
    assert note.endswith("it runs without the hook")
    target.more_steps(2)
