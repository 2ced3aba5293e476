"""What cannot be moved, suspended or resumed is refused before anything stops."""

import errno
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest

from phosd.engine.image import private_files
from phosd.engine.job.progress import Progress
from phosd.engine.node import placement
from phosd.engine.node.gpus import GpuInfo, list_gpus
from phosd.engine.node.node import Node
from phosd.engine.operations import migrate as migrate_module
from phosd.engine.operations import shelves
from phosd.engine.operations import suspend as suspend_module
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.engine.program.process_gpus import gpu_uuids
from phosd.engine.recovery import rescue
from phosd.engine.recovery.stranded import stranded
from phosd.errors import (
    Busy,
    GpuMismatch,
    InvalidOption,
    NoSuchProcess,
    NotAuthorized,
    OutOfMemory,
    OutOfSpace,
    PhosError,
    Unsupported,
)
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    all_compute_right,
    computes_right,
    save,
)
from tests.node.moves.random_moves import gpus_of
from tests.support.harness import Target, wait_until

STRANGER = 65534


def refused(kind: type[PhosError], match: str, act: Callable[[Progress], object]) -> None:
    """The action is refused, with a way out, and nothing stood still for it."""
    progress = Progress()
    with pytest.raises(kind, match=match) as raised:
        act(progress)
    assert raised.value.hint
    assert progress.stop_seconds == 0 and not any(p.stopped for p in progress.phases)


def moving(node: Node, target: Target, to: str, mode: str = "auto") -> Callable[[Progress], object]:
    return lambda progress: migrate(node, target.pid, MigrateOptions(to, mode=mode), progress)


@pytest.fixture
def single(node: Node, start: Starter) -> Target:
    target = start("single")
    target.wait_for_steps(3)
    return target


def test_destinations_that_mean_nothing(
    node: Node, single: Target, undisturbed: Undisturbed
) -> None:
    for to, why in (
        ("0", "is on GPU 0 already"),
        ("0:0", "already"),
        (gpu_uuids()[0], "already"),
        ("2", "names no GPU"),
        ("-1", "names no GPU"),
        ("", "names no GPU"),
        ("GPU-ffff", "names no GPU"),
        ("GPU-", "names several GPUs"),
        ("1:0", "does not use GPU 1"),
        ("0:1,0:1", "names GPU 0 twice"),
        ("0:1,1:0", "does not use GPU 1"),
        ("0:", "names no GPU"),
        (":1", "names no GPU"),
        ("0:1:1", "names no GPU"),
        ("x" * 100_000, "names no GPU"),
    ):
        refused(InvalidOption, why, moving(node, single, to))
    computes_right(single, undisturbed)
    assert moving(node, single, f" {gpu_uuids()[1]} ")(Progress()) == {0: 1}
    computes_right(single, undisturbed)


@pytest.mark.parametrize("ahead", ["", "1"], ids=["now", "ahead"])
def test_a_descriptor_that_it_keeps_would_lead_to_other_memory(
    node: Node, start: Starter, undisturbed: Undisturbed, ahead: str
) -> None:
    target = start("kept_handle", extra={"PHOS_TEST_AHEAD": ahead})
    target.wait_for_steps(3)
    why = "keeps device memory open to share it"
    for hollow in (False, True):
        with pytest.raises(Unsupported, match=why):
            suspend(node, target.pid, SuspendOptions(hollow=hollow), Progress())
    with pytest.raises(Unsupported, match=why):
        moving(node, target, "1")(Progress())
    target.more_steps(2 * AFTER)
    computes_right(target, undisturbed)


def test_destinations_of_a_program_on_two_gpus(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("two_devices")
    target.wait_for_steps(3)
    refused(InvalidOption, "does not say where each goes", moving(node, target, "1"))
    refused(InvalidOption, "two of the program's GPUs", moving(node, target, "0:1"))
    refused(InvalidOption, "two of the program's GPUs", moving(node, target, "0:1,1:1"))
    refused(InvalidOption, "already", moving(node, target, "0:0,1:1"))
    computes_right(target, undisturbed)


def test_a_mode_that_is_none(node: Node, single: Target, undisturbed: Undisturbed) -> None:
    refused(InvalidOption, "no mode 'fast'", moving(node, single, "1", "fast"))
    computes_right(single, undisturbed)


def test_another_chip(
    node: Node, single: Target, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed() -> list[GpuInfo]:
        here, there = list_gpus()
        return [here, replace(there, name="Another GPU")]

    monkeypatch.setattr(migrate_module, "list_gpus", mixed)
    refused(GpuMismatch, "GPU 1 a Another GPU", moving(node, single, "1"))
    computes_right(single, undisturbed)


@pytest.mark.parametrize("why", ["is in MIG mode", "is used through MPS"])
def test_a_divided_gpu(
    why: str,
    node: Node,
    single: Target,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "divided", lambda gpu: why if gpu == 1 else "")
    refused(Unsupported, f"GPU 1 {why}", moving(node, single, "1"))
    suspend(node, single.pid, SuspendOptions(), Progress())
    refused(
        Unsupported,
        f"GPU 1 {why}",
        lambda progress: resume(node, single.pid, ResumeOptions("1"), progress),
    )
    resume(node, single.pid, ResumeOptions(), Progress())
    computes_right(single, undisturbed)


def test_managed_memory(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("managed")
    target.wait_for_steps(3)
    for mode in ("auto", "precopy", "driver"):
        refused(Unsupported, "managed memory", moving(node, target, "1", mode))
    refused(
        Unsupported,
        "managed memory",
        lambda progress: suspend(node, target.pid, SuspendOptions(), progress),
    )
    computes_right(target, undisturbed)


def test_modes_that_cannot_be(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Shared memory the driver would lose; without the hook there is nobody to copy before."""
    pair, bare = start("shared_pair"), start("single", hooked=False)
    for target in (pair, bare):
        target.wait_for_steps(3)
    refused(Unsupported, "shares device memory", moving(node, pair, "1", "driver"))
    refused(Unsupported, "without the hook", moving(node, bare, "0:1,1:0", "precopy"))
    all_compute_right(undisturbed, pair, bare)


def test_too_little_memory(
    node: Node, single: Target, start: Starter, undisturbed: Undisturbed
) -> None:
    """A neighbour has the destination. It is not harmed, and when it is gone the move is made."""
    node.movers.mover(1)  # which itself would find no memory
    neighbour = start("greedy", hooked=False, extra={"CUDA_VISIBLE_DEVICES": "1"})
    wait_until(lambda: b"took" in neighbour.log.read_bytes(), "the neighbour to have it all")
    refused(OutOfMemory, r"GPU 1 has .* free", moving(node, single, "1"))
    computes_right(single, undisturbed)
    assert neighbour.process.poll() is None
    neighbour.kill()
    migrate(node, single.pid, MigrateOptions("1"), Progress())
    computes_right(single, undisturbed)


def test_another_user(node: Node, single: Target, undisturbed: Undisturbed) -> None:
    options = MigrateOptions("1", caller=STRANGER)
    refused(
        NotAuthorized, f"uid {STRANGER} may not", lambda p: migrate(node, single.pid, options, p)
    )
    asleep = SuspendOptions(caller=STRANGER)
    refused(
        NotAuthorized, f"uid {STRANGER} may not", lambda p: suspend(node, single.pid, asleep, p)
    )
    suspend(node, single.pid, SuspendOptions(), Progress())
    refused(
        NotAuthorized,
        f"not to {STRANGER}",
        lambda p: resume(node, single.pid, ResumeOptions(caller=STRANGER), p),
    )
    refused(
        NotAuthorized,
        f"not to {STRANGER}",
        lambda p: swap(node, os.getpid(), single.pid, SwapOptions(caller=STRANGER), p),
    )
    resume(node, single.pid, ResumeOptions(), Progress())
    computes_right(single, undisturbed)


def test_processes_that_are_not_there(node: Node) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    refused(NoSuchProcess, str(gone.pid), lambda p: migrate(node, gone.pid, MigrateOptions("1"), p))
    refused(NoSuchProcess, str(gone.pid), lambda p: suspend(node, gone.pid, SuspendOptions(), p))
    refused(NoSuchProcess, str(gone.pid), lambda p: resume(node, gone.pid, ResumeOptions(), p))


def test_who_is_not_suspended_is_not_resumed(
    node: Node, single: Target, undisturbed: Undisturbed
) -> None:
    pid = single.pid
    refused(NoSuchProcess, "not suspended", lambda p: resume(node, pid, ResumeOptions(), p))
    refused(NoSuchProcess, "not suspended", lambda p: swap(node, pid, pid, SwapOptions(), p))
    computes_right(single, undisturbed)


def test_who_is_suspended_is_left_alone(
    node: Node, single: Target, undisturbed: Undisturbed
) -> None:
    """By all but a resume. Its image's program lives, so that it is not restored beside it."""
    image = save(node, single, "stop").id
    single.more_steps(AFTER)
    suspend(node, single.pid, SuspendOptions(), Progress())
    pid, way_out = single.pid, f"`phos resume {single.pid}` first"
    for act in (
        lambda p: checkpoint(node, pid, CheckpointOptions(), p),
        lambda p: migrate(node, pid, MigrateOptions("1"), p),
        lambda p: suspend(node, pid, SuspendOptions(), p),
        lambda p: swap(node, pid, pid, SwapOptions(), p),
        lambda _: rescue.bring_back(pid, node.config.runtime_dir),
    ):
        progress = Progress()
        with pytest.raises(Busy, match=f"process {pid} is suspended") as raised:
            act(progress)
        assert raised.value.hint == way_out and progress.stop_seconds == 0
    with pytest.raises(PhosError, match=str(pid)):
        restore(node, image, RestoreOptions(), Progress())
    assert pid not in {each.pid for each in stranded(node.config.runtime_dir)}
    resume(node, pid, ResumeOptions(), Progress())
    computes_right(single, undisturbed)


def test_places_that_are_none(node: Node, single: Target, undisturbed: Undisturbed) -> None:
    for where in ("", "tape", "memory,disk"):
        refused(
            InvalidOption,
            "where is|cannot be kept in",
            lambda p, where=where: suspend(node, single.pid, SuspendOptions(where), p),  # type: ignore[misc]
        )
    computes_right(single, undisturbed)


def test_host_memory_and_disk_are_short(
    node: Node, single: Target, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory it goes to the disk; without either it runs on."""
    pid = single.pid
    with monkeypatch.context() as patch:
        patch.setattr(shelves, "available_memory", lambda: 1 << 20)
        refused(
            OutOfSpace, r"\(memory\)", lambda p: suspend(node, pid, SuspendOptions("memory"), p)
        )
        assert suspend(node, pid, SuspendOptions(), Progress()).where == "disk"
        resume(node, pid, ResumeOptions(), Progress())
        patch.setattr(type(node.suspend_store.shelf("disk")), "free_bytes", lambda _: 1 << 20)
        refused(OutOfSpace, r"\(disk\)", lambda p: suspend(node, pid, SuspendOptions("disk"), p))
        refused(OutOfSpace, "memory or on", lambda p: suspend(node, pid, SuspendOptions(), p))
    assert gpus_of(node, single) == (0,)
    computes_right(single, undisturbed)


def test_a_disk_that_is_full_takes_no_shelf(
    node: Node, single: Target, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the few bytes that it begins with."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(private_files, "write_durably", full)
        refused(
            OutOfSpace,
            "where suspended programs are kept, failed: No space left",
            lambda p: suspend(node, single.pid, SuspendOptions("disk"), p),
        )
    computes_right(single, undisturbed)


def test_host_memory_is_short_for_the_driver(
    node: Node, single: Target, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a context takes in host memory is asked for, on any GPU that has contexts of a size."""
    size = 1 << 50
    for module in (migrate_module, suspend_module, "phosd.engine.operations.move_checks"):
        target = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{target}.context_bytes", lambda: size)
    monkeypatch.setattr(migrate_module, "require_device_memory", lambda *_: None)
    refused(OutOfMemory, "host memory", moving(node, single, "1"))
    refused(
        OutOfMemory,
        "host memory",
        lambda p: suspend(node, single.pid, SuspendOptions(), p),
    )
    computes_right(single, undisturbed)
