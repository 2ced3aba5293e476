"""What cannot be checkpointed is refused with a clear error, and nothing is lost."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node import gpus
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint, try_checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.system.native import hook_library
from phosd.errors import Busy, NoSuchProcess, Reason, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.harness import wait_until


def attempt(node: Node, pid: int, mode: str = "auto") -> None:
    checkpoint(node, pid, CheckpointOptions(mode=mode), Progress())


def test_a_pid_that_does_not_exist(node: Node) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(NoSuchProcess, match=f"process {gone.pid} does not exist"):
        attempt(node, gone.pid)


def test_phosd_itself(node: Node) -> None:
    """It would freeze itself, and nobody would be left to let it go on."""
    with subprocess.Popen(["sleep", "60"]) as child:  # a tree, as a container's first process has
        for refused in (
            lambda: attempt(node, os.getpid()),
            lambda: suspend(node, os.getpid(), SuspendOptions(), Progress()),
            lambda: migrate(node, os.getpid(), MigrateOptions("0"), Progress()),
            lambda: attempt(node, node.movers.mover(0).pid),
        ):
            with pytest.raises(Unsupported, match=r"is phosd itself|is a mover of phosd"):
                refused()
        (found, *_) = try_checkpoint(node, os.getpid(), CheckpointOptions(), Progress())
        assert "is phosd itself" in found.text
        child.kill()


def test_a_process_without_a_gpu(node: Node) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        with pytest.raises(NoSuchProcess, match="GPU process"):
            attempt(node, sleeper.pid)
        assert sleeper.poll() is None
        sleeper.kill()


def test_a_zombie(node: Node) -> None:
    with subprocess.Popen(["true"]) as dead:
        wait_until(lambda: is_zombie(dead.pid), "a zombie")
        with pytest.raises(NoSuchProcess, match="has ended"):
            attempt(node, dead.pid)


def is_zombie(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_landlock_rules(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """The kernel tells nobody of them, and they would be gone after a restore."""
    target = start("sandboxed")
    target.wait_for_steps(3)
    with pytest.raises(Unsupported, match="is under Landlock rules"):
        attempt(node, target.pid)
    assert node.store.list() == []
    computes_right(target, undisturbed)


@pytest.mark.parametrize(
    ("library", "variable", "named"),
    [
        ("libsanitizer-collection.so", "", "compute-sanitizer"),
        ("libcudadebugger.so.580.159.03", "", r"CUDA's debugger \(cuda-gdb\)"),
        ("libcuda-injection.so", "", r"Nsight Compute \(ncu\)"),
        ("libToolsInjection64.so", "", r"Nsight Systems \(nsys\)"),
        ("mine.so", "CUDA_INJECTION64_PATH", r"the tool \S+/mine.so \(CUDA_INJECTION64_PATH\)"),
    ],
)
def test_tools_of_cuda(
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    tmp_path: Path,
    library: str,
    variable: str,
    named: str,
) -> None:
    """The driver would refuse some of them once the program stands still."""
    tool = tmp_path / library
    subprocess.run(["gcc", "-shared", "-o", str(tool), "-xc", "/dev/null"], check=True)
    loaded = {"LD_PRELOAD": f"{hook_library()}:{tool}"}
    target = start("single", extra=loaded | ({variable: str(tool)} if variable else {}))
    target.wait_for_steps(3)
    (listed,) = [each for each in node.processes() if each.pid == target.pid]
    assert listed.hook_state == "unsupported" and re.search(f"runs under {named}", listed.reason)
    (found,) = try_checkpoint(node, target.pid, CheckpointOptions(), Progress())
    for act in (
        partial(attempt, node, target.pid),
        partial(suspend, node, target.pid, SuspendOptions(), Progress()),
        partial(migrate, node, target.pid, MigrateOptions(to="1"), Progress()),
    ):
        with pytest.raises(Unsupported, match=f"runs under {named}, which the driver") as refused:
            act()
        assert refused.value.reason == Reason.CUDA_TOOL
        assert str(refused.value) == str(found.trouble)
    computes_right(target, undisturbed)


PROFILER = """
#define _GNU_SOURCE
#include <dlfcn.h>
void *profile(void) { return dlsym(RTLD_DEFAULT, "cuGetExportTable"); }
"""


def test_a_program_that_has_profiled(
    node: Node, start: Starter, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """CUPTI is loaded with PyTorch; what the driver does not save is a program that has used it."""
    tool, source = tmp_path / "libcupti.so.13", tmp_path / "cupti.c"
    source.write_text(PROFILER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tool, source], check=True)
    target = start("profiled", arguments=("0", str(tool)))
    target.wait_for_steps(3)
    attempt(node, target.pid)
    (target.log.parent / "profile").touch()
    wait_until(lambda: not (target.log.parent / "profile").exists(), "it to profile")
    target.more_steps(1)
    (found,) = try_checkpoint(node, target.pid, CheckpointOptions(), Progress())
    with pytest.raises(Unsupported, match="has used CUPTI, as profilers do") as refused:
        attempt(node, target.pid)
    assert refused.value.reason == Reason.CUDA_TOOL
    assert str(refused.value) == str(found.trouble)
    computes_right(target, undisturbed)


def test_an_injected_library_that_was_not_loaded_is_no_tool(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single", extra={"CUDA_INJECTION64_PATH": "/nowhere/mine.so"})
    target.wait_for_steps(3)
    attempt(node, target.pid)
    computes_right(target, undisturbed)


def test_a_driver_that_ends_programs(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program is touched with it, unless the administrator says so."""
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(), Progress())
    monkeypatch.setattr(gpus, "driver_release", lambda: "610.57.04")
    for act in (
        partial(attempt, node, target.pid),
        partial(suspend, node, target.pid, SuspendOptions(), Progress()),
        partial(migrate, node, target.pid, MigrateOptions(to="1"), Progress()),
    ):
        with pytest.raises(
            Unsupported, match=r"driver 610\.57\.04: its lock .*issues/58"
        ) as refused:
            act()
        assert refused.value.reason == Reason.UNSAFE_DRIVER
    (found,) = try_checkpoint(node, target.pid, CheckpointOptions(), Progress())
    assert str(found.trouble) == str(refused.value)
    assert [each.id for each in node.store.list()] == [image.id]
    allowing = replace(node.config, allow_unsafe_driver=True)
    with monkeypatch.context() as patch:
        patch.setattr(node, "config", allowing)
        attempt(node, target.pid)
    monkeypatch.setattr(gpus, "driver_release", lambda: "610.570.1")
    attempt(node, target.pid)
    computes_right(target, undisturbed)


def test_no_new_privileges_alone_are_no_rules(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("sandboxed", extra={"PHOS_TEST_RULES": "none"})
    target.wait_for_steps(3)
    attempt(node, target.pid)
    computes_right(target, undisturbed)


@pytest.mark.parametrize("mode", ["auto", "stop", "driver"])
def test_managed_memory(mode: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("managed")
    target.wait_for_steps(3)
    with pytest.raises(Unsupported, match=r"managed memory .* `phos run --managed=host`") as caught:
        attempt(node, target.pid, mode)
    assert caught.value.reason == Reason.MANAGED_MEMORY
    assert node.store.list() == []
    computes_right(target, undisturbed)


def test_managed_memory_without_the_hook(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("managed", hooked=False)
    target.wait_for_steps(3)
    with pytest.raises(Unsupported) as caught:
        attempt(node, target.pid)
    assert caught.value.reason == Reason.DRIVER_REFUSES
    assert node.store.list() == []
    computes_right(target, undisturbed)


def test_stop_needs_the_hook(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("single", hooked=False)
    target.wait_for_steps(3)
    with pytest.raises(Unsupported, match="without the hook") as caught:
        attempt(node, target.pid, "stop")
    assert caught.value.reason == Reason.NO_HOOK
    computes_right(target, undisturbed)


def test_driver_mode_is_refused_for_memory_shared_between_processes(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Imported memory would be lost by the driver: never a broken program."""
    target = start("shared_pair")
    target.wait_for_steps(3)
    with pytest.raises(Unsupported):
        attempt(node, target.pid, "driver")
    assert node.store.list() == []
    computes_right(target, undisturbed)


def test_one_job_at_a_time(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("workers")
    target.wait_for_steps(3)
    refused: list[bool] = []

    def second(_: Progress) -> None:
        with pytest.raises(Busy, match="another job"):
            attempt(node, target.pid)
        refused.append(True)

    checkpoint(node, target.pid, CheckpointOptions(mode="stop"), at_phase("cpu", second))
    assert refused
    assert len(node.store.list()) == 1
    computes_right(target, undisturbed)


def test_no_gpu_and_no_software_gpu(place: Path) -> None:
    """A machine that has neither says so, and what to do."""
    program = (
        "from phosd.engine.system import cuda\n"
        "from phosd.errors import PhosError\n"
        "try:\n"
        "    cuda.driver()\n"
        "except PhosError as error:\n"
        "    print(error.code, error)\n"
    )
    env = os.environ | {"PHOS_GPU": "real", "LD_LIBRARY_PATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Unsupported"), done
    assert "install the NVIDIA driver" in done.stdout
