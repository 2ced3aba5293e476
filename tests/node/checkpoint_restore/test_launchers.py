"""Programs whose first process asks about GPUs and has others do the work, as vLLM and torchrun do.

NVML loads libcuda: the driver then knows a launcher that has never begun CUDA.
"""

from pathlib import Path

import pytest

from phosd.engine import CheckpointOptions, Node, Progress, checkpoint
from phosd.engine.hook_client.link import HookLink
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program.process import has_only_nvml
from phosd.engine.system.cuda import is_software
from phosd.engine.system.native import softgpu_folder
from phosd.errors import Busy, NoSuchProcess
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, bring_back, check, save
from tests.support import harness
from tests.support.device_files import pretend
from tests.support.harness import Target, children, wait_until

STATES = ("nothing", "nvml", "nvml-shut", "libcuda", "init", "released", "context")
KNOWN = {"nvml", "nvml-shut", "init", "released", "context"}
"""The driver tells a state of a process in these."""
CUDA = {"init", "released", "context"}
NVML = {"nvml", "nvml-shut"}
PLACES = range(len(STATES))
TREES = [(STATES[a], STATES[b], STATES[(a + b) % len(STATES)]) for a in PLACES for b in PLACES]
"""States of the parent, the middle process and the leaf: each pair of each two of them."""


@pytest.fixture
def nvml(place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a program needs to find NVML; the software GPU's opens a device, as the real one."""
    if not is_software():
        return {}
    pretend(place, monkeypatch)
    return {"PHOS_TEST_NVML": str(softgpu_folder() / "nvml/libnvidia-ml.so.1")}


def started(start: Starter, states: tuple[str, ...], nvml: dict[str, str]) -> Target:
    target = start("launcher", arguments=("0", *states), extra=nvml)
    target.wait_for_steps(3)
    return target


def right(steps: int, leaf: str, nvml: dict[str, str], target: Target) -> dict[int, str]:
    """The values of a program that is the leaf alone."""
    return harness.undisturbed("launcher", steps, leaf, extra=nvml, compared=target)


def pids(target: Target, states: tuple[str, ...]) -> dict[int, str]:
    """The states of the processes, by pid."""
    found = [target.pid, *sorted(children(target.pid))]
    assert len(found) == len(states)
    return dict(zip(found, states, strict=True))


def test_its_memory_is_kept_between_jobs(
    node: Node, start: Starter, nvml: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has none, and phosd need not know what it frees: nothing is copied again."""
    monkeypatch.setattr(HookLink, "rehome", lambda *_: pytest.fail("all of it has been copied"))
    target = started(start, ("nvml", "nothing", "context"), nvml)
    save(node, target, "concurrent")
    image = save(node, target, "concurrent")
    original = target.more_steps(AFTER)
    target.kill()
    check(bring_back(node, target, image.id), target.values() | original, {})
    save(node, target, "concurrent")


@pytest.mark.parametrize("states", TREES, ids="-".join)
def test_a_tree_is_saved_as_what_its_processes_are(
    states: tuple[str, ...], node: Node, start: Starter, nvml: dict[str, str]
) -> None:
    target = started(start, states, nvml)
    processes = pids(target, states)
    assert {pid for pid in processes if has_only_nvml(pid)} == {
        pid for pid, state in processes.items() if state in NVML
    }
    if not KNOWN & {*states}:
        with pytest.raises(NoSuchProcess, match="nor a child of it is a GPU process"):
            save(node, target, "auto")
        return
    listed = {each.pid: each.hook_state for each in node.processes() if each.pid in processes}
    assert listed == {
        pid: "hooked" if state in CUDA else "driver"
        for pid, state in processes.items()
        if state in KNOWN
    }
    manifest = save(node, target, "auto")
    assert manifest.mode == ("concurrent" if CUDA & {*states} else "driver")
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    restored = bring_back(node, target, manifest.id)
    check(restored, original, right(60, states[-1], nvml, target))
    assert {pid for pid in processes if has_only_nvml(pid)} == {
        pid for pid, state in processes.items() if state in NVML
    }


@pytest.mark.parametrize("mode", ["stop", "driver"])
def test_a_launcher_is_suspended_and_saved_again(
    mode: str, node: Node, start: Starter, nvml: dict[str, str]
) -> None:
    """After a resumption its NVML answers as before, which it checks itself with each step."""
    target = started(start, ("nvml", "context"), nvml)
    for _ in range(2):
        suspend(node, target.pid, SuspendOptions(), Progress())
        resume(node, target.pid, ResumeOptions(), Progress())
        target.more_steps(2)
        save(node, target, mode)
        target.more_steps(2)
    target.kill()
    values = target.values()
    expected = right(max(values) + 1, "context", nvml, target)
    assert values == {step: expected[step] for step in values}


def test_a_launcher_that_begins_cuda_meanwhile(
    node: Node, start: Starter, nvml: dict[str, str], place: Path
) -> None:
    """Its memory would be the driver's to save, and its gate nobody's to close."""
    told = place / "told"
    target = start(
        "launcher",
        arguments=("0", "nvml", "context"),
        extra=nvml | {"PHOS_TEST_BEGINS_CUDA": str(told)},
    )
    target.wait_for_steps(3)

    def meanwhile(progress: Progress) -> None:
        if progress.phases and progress.phases[-1].name == "drain" and not told.exists():
            told.touch()
            wait_until(lambda: not has_only_nvml(target.pid), "the launcher to begin CUDA")

    with pytest.raises(Busy, match=f"process {target.pid} (began|has begun) to use (the|a) GPU"):
        checkpoint(
            node,
            target.pid,
            CheckpointOptions(mode="concurrent"),
            Progress(observer=meanwhile),
        )
    target.more_steps(2)
    assert node.store.list() == []
    save(node, target, "concurrent")
