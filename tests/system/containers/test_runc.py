"""A GPU program in a container of runc's or crun's is saved and restored by its own commands."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.criu.run.program import Criu
from phosd.engine.system import cuda
from phosd.engine.system.native import runtime_plugins
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.node.containers.conftest import place, undisturbed
from tests.support import containers, device_files, harness
from tests.support.containers import Contained, Runc
from tests.support.harness import alive, children, wait_until
from tests.support.rotation import EVERYTHING
from tests.support.service import bus
from tests.system.service.test_end_to_end import phos, phosd

__all__ = ["bus", "place", "undisturbed"]

LIBDIR = f"libdir {runtime_plugins()}\n"


RUNTIMES = [
    "runc",
    pytest.param(
        str(containers.CRUN),
        marks=pytest.mark.skipif(
            not containers.CRUN.exists(), reason="`make setup-containers` fetches crun"
        ),
        id="crun",
    ),
]


@contextmanager
def running(
    place: Path, runtime: str = "runc", *, read_only: bool = False
) -> Iterator[tuple[Contained, Runc]]:
    with containers.run_by_runc(
        "single", place, criu=LIBDIR, runtime=runtime, read_only=read_only
    ) as target:
        assert target.runc is not None
        target.wait_for_steps(3)
        yield target, target.runc


def succeeded(done: "subprocess.CompletedProcess[str]", place: Path) -> None:
    logs = [path.read_text(errors="replace")[-3000:] for path in place.glob("*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, *logs])


def saved(target: Contained, image: Path, place: Path, *options: str) -> None:
    """Save a program that replaces its workers. If it did so meanwhile, runc is asked again, as
    phosd says in runc's log.
    """
    assert target.runc is not None
    log = place / "dump.log"
    while (done := target.runc.checkpoint(image, *options)).returncode != 0:
        assert "during the checkpoint" in log.read_text(errors="replace"), done.stdout
        shutil.rmtree(image, ignore_errors=True)
        target.more_steps(2)


def right(target: Contained, undisturbed: Undisturbed) -> None:
    values = target.values()
    expected = undisturbed(target.program, steps=max(values) + 1)
    assert values == {step: expected[step] for step in values}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_saved_while_it_runs_on_then_ended_and_restored_twice(
    runtime: str, bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    with phosd(bus, place), running(place, runtime, read_only=True) as (target, runc):
        for _ in range(containers.ROUNDS):
            for _ in range(2):
                succeeded(runc.checkpoint(place / "image", "--leave-running"), place)
                target.more_steps(2)
            succeeded(runc.checkpoint(place / "last"), place)
            wait_until(lambda: not alive(target.first), "the container to end")
            position = target.position()
            for _ in range(2):
                if alive(target.first):
                    os.kill(target.first, 9)
                    wait_until(lambda: not alive(target.first), "the container to end")
                os.truncate(target.log, position)  # CRIU wants files as they were
                runc.delete()
                succeeded(runc.restore(place / "last"), place)
                target.first = runc.pid
                target.wait_for_steps(2, since=position)
                (found,) = [row for row in phos(bus, place, "ps") if row["pid"] == runc.pid]
                assert (found["state"], found["hook"]) == ("running", "hooked")
                right(target, undisturbed)
        os.kill(runc.pid, 9)


@pytest.fixture
def network() -> Iterator[Path]:
    """A network namespace, such as a runtime makes for a container that publishes ports."""
    name = f"phos-test-{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    yield Path("/run/netns") / name
    subprocess.run(["ip", "netns", "delete", name], check=True)


def save_and_restore(target: Contained, runc: Runc, place: Path) -> None:
    """Save a container, which ends it, and restore it; it computes on."""
    succeeded(runc.checkpoint(place / "last"), place)
    wait_until(lambda: target.process.poll() is not None, "the container to end")
    position = target.position()
    runc.delete()
    succeeded(runc.restore(place / "last"), place)
    target.first = runc.pid
    target.wait_for_steps(2, since=position)


def test_with_a_network_of_its_own(
    bus: str, place: Path, network: Path, undisturbed: Undisturbed
) -> None:
    """phosd is in it, too, as it would not reach the software GPU from elsewhere."""
    entering = ["nsenter", f"--net={network}"]
    by_runc = containers.run_by_runc("single", place, criu=LIBDIR, network=network)
    with phosd(bus, place, entering=entering), by_runc as target:
        runc = target.runc
        assert runc is not None
        target.wait_for_steps(3)
        succeeded(runc.checkpoint(place / "one", "--leave-running"), place)
        target.more_steps(2)
        save_and_restore(target, runc, place)
        assert Path(f"/proc/{target.pid}/ns/net").samefile(network)
        right(target, undisturbed)


def test_without_phosd_a_gpu_program_is_not_saved_and_runs_on(
    place: Path, undisturbed: Undisturbed
) -> None:
    with running(place) as (target, runc):
        done = runc.checkpoint(place / "image")
        assert done.returncode != 0
        assert "phosd does not answer" in (place / "dump.log").read_text()
        target.more_steps(2)
        right(target, undisturbed)


LOADS = "import ctypes, os, sys, time; ctypes.CDLL(sys.argv[1]); os.fork(); time.sleep(1000)"


def test_who_has_the_drivers_library_and_no_gpu_is_saved_as_ever(bus: str, place: Path) -> None:
    """Each process of the tree."""
    (images := place / "image").mkdir()
    library = f"{cuda.software_gpu()}/libcuda.so.1"
    with (
        phosd(bus, place),
        harness.running(
            [sys.executable, "-c", LOADS, library],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as program,
    ):
        (child,) = wait_until(lambda: children(program.pid), "the fork")
        done = subprocess.run(
            [Criu.find().path, "dump", "--tree", str(program.pid), "--images-dir", images,
             "--libdir", str(runtime_plugins())],
            capture_output=True,
            env=os.environ | {"PHOS_RUNTIME_DIR": str(place / "run")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not [*images.glob("phos-*")]
        assert not alive(child)


def test_a_dump_ahead_of_the_dump_is_refused(place: Path) -> None:
    """By CRIU itself: runc asks for none where the kernel does not tell which pages changed."""
    with running(place) as (target, _):
        (images := place / "ahead").mkdir()
        done = subprocess.run(
            [Criu.find().path, "pre-dump", "--tree", str(target.pid), "--images-dir", images,
             "--libdir", str(runtime_plugins())],
            capture_output=True,
        )  # fmt: skip
        assert done.returncode != 0
        assert b"is saved at once" in done.stderr
        target.more_steps(2)


def test_what_is_left_when_the_checkpoint_fails_runs_on(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """There is no room for the device memory: CRIU is told, after the program was taken off."""
    (full := place / "full").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "full", full], check=True)
    try:
        with phosd(bus, place), running(place) as (target, runc):
            assert runc.checkpoint(full / "image").returncode != 0
            assert "MB free" in (place / "dump.log").read_text()
            target.more_steps(2)
            right(target, undisturbed)
    finally:
        subprocess.run(["umount", full], check=True)


def test_what_cannot_be_written_fails_when_the_program_runs_on(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """At CRIU's exit. The place of the memory stays, so that nobody takes there to be none."""
    with (
        phosd(bus, place, PHOS_FAULT="runtime-write"),
        running(place) as (target, runc),
    ):
        done = runc.checkpoint(place / "image", "--leave-running")
        assert done.returncode != 0
        assert "fault point" in (place / "dump.log").read_text(), done.stdout
        (begun,) = (place / "image").glob("phos-*")
        target.more_steps(2)
        succeeded(runc.checkpoint(place / "image", "--leave-running"), place)
        assert [*(place / "image").glob("phos-*.json")] and not begun.exists()
        target.more_steps(2)
        right(target, undisturbed)


def test_forks_have_the_drivers_devices(
    bus: str, place: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU alone refuses the software GPU's device, as it does NVIDIA's."""
    device = device_files.pretend(containers.shared(place), monkeypatch)
    with (
        phosd(bus, place),
        containers.run_by_runc(
            "inheritors", place, criu=LIBDIR, block_device=device_files.LOOP
        ) as target,
    ):
        runc = target.runc
        assert runc is not None
        target.wait_for_steps(5)
        assert device_files.mapped(min(children(target.pid)), device)
        saved(target, place / "one", place, "--leave-running")
        target.more_steps(2)
        saved(target, place / "last", place)
        wait_until(lambda: not alive(target.first), "the container to end")
        position = target.position()
        runc.delete()
        succeeded(runc.restore(place / "last"), place)
        target.first = runc.pid
        assert not device_files.mapped(min(children(target.pid)), device)
        target.wait_for_steps(2, since=position)
        assert device_files.mapped(target.pid, device)
        right(target, undisturbed)


OTHER = """
static int fails(int pid) { return -(pid > 0); }
struct { const char *name; void *init, *end; unsigned version, count; void *hooks[12]; }
CR_PLUGIN_DESC = { "other", 0, 0, 2 << 8, 12, { [HOOK] = fails } };
"""
"""A plugin for CRIU, with a hook that fails."""


def with_other(place: Path, hook: int, *, first: bool) -> Path:
    """A folder of phosd's plugin and the other one, of which CRIU finds one first: which depends on
    the file system, and on names or on what was made first.
    """
    ours = next(runtime_plugins().glob("*.so"))
    for number in range(64):
        (folder := place / f"plugins-{number}").mkdir()
        other = folder / f"other{number}.so"
        if number % 2:
            shutil.copy(ours, folder)
        build = ["cc", "-shared", "-fPIC", "-x", "c", f"-DHOOK={hook}", "-", "-o", str(other)]
        subprocess.run(build, input=OTHER.encode(), check=True)
        if not number % 2:
            shutil.copy(ours, folder)
        if (os.listdir(folder)[0] == other.name) == first:  # noqa: PTH208 - as CRIU reads it
            return folder
    raise AssertionError(f"the file system of {place} always lists the same one first")


@pytest.mark.parametrize("hook", [10, 11], ids=["pause", "checkpoint"])
def test_another_plugin_that_fails_leaves_the_program_running(
    hook: int, bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """Such as NVIDIA's, which finds that the driver was told to save the program already."""
    folder = with_other(place, hook, first=True)
    with phosd(bus, place), running(place) as (target, runc):
        (place / "criu.conf").write_text(f"libdir {folder}\n")
        for words in (["--leave-running"], []):
            assert runc.checkpoint(place / "image", *words).returncode != 0
            target.more_steps(2)
        right(target, undisturbed)


@pytest.mark.skipif(not EVERYTHING, reason="`make test-all`")
def test_another_plugin_is_not_asked_after_phosds(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    with phosd(bus, place), running(place) as (target, runc):
        (place / "criu.conf").write_text(f"libdir {with_other(place, 10, first=False)}\n")
        save_and_restore(target, runc, place)
        right(target, undisturbed)


def test_a_restore_without_its_memory_fails(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """Without phosd, on another node, or with damaged memory: nothing is left that looks
    restored.
    """
    (elsewhere := place / "elsewhere").mkdir()
    (elsewhere / "run").symlink_to(place / "run")
    with running(place) as (target, runc):
        with phosd(bus, place):
            succeeded(runc.checkpoint(place / "image"), place)
            wait_until(lambda: target.process.poll() is not None, "the container to end")
        position = target.position()
        runc.delete()
        done = runc.restore(place / "image")
        assert done.returncode != 0
        assert "phosd's to load" in (place / "restore.log").read_text()
        runc.delete()
        with phosd(bus, elsewhere):
            assert runc.restore(place / "image").returncode != 0
            log = (place / "restore.log").read_text()
            assert "saved on another node; restore it on the node that saved it" in log
            runc.delete()
        with phosd(bus, place):
            saved = {path: path.read_bytes() for path in (place / "image").glob("phos-*")}
            manifest = next(path for path in saved if path.suffix == ".json")
            pack = next(path for path in saved if path.suffix == ".pack")
            manifest.write_bytes(saved[manifest].replace(b'"suspend"', b'"suspenD"'))
            for error, missing in (
                ("is not what was written here: it was changed", [manifest]),
                ("was not written to the end", [*saved]),
                ("lacks what phosd has saved", []),
                (f"{pack.name} of the device memory cannot be opened", []),
            ):
                if pack.name in error:
                    for path in saved.keys() - {pack}:
                        path.write_bytes(saved[path])
                os.truncate(target.log, position)
                assert runc.restore(place / "image").returncode != 0
                assert error in (place / "restore.log").read_text()
                runc.delete()
                for path in missing:
                    path.unlink(missing_ok=True)
            pack.write_bytes(saved[pack])  # as all files of a copy, not closed to others
            (away := place / "away").mkdir()
            (place / "criu.conf").write_text(f"libdir {away}\n")  # with other plugins, if any
            assert runc.restore(place / "image").returncode != 0
            assert "Missing required plugin: phos" in (place / "restore.log").read_text()
            runc.delete()
            (place / "criu.conf").write_text(LIBDIR)
            os.truncate(target.log, position)
            succeeded(runc.restore(place / "image"), place)
            target.first = runc.pid
            target.wait_for_steps(2, since=position)
            right(target, undisturbed)
