"""The real daemon over the real engine, asked by the real clients: save, kill, restore, compare."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.image.packs import RECORD
from phosd.engine.mover.protocol.endpoint import listeners
from tests.support.bus import busctl
from tests.support.harness import PROGRAMS, Target, alive, parse, start, wait_until
from tests.support.service import MANAGER, ROOT

NAME = "org.phos"


@contextmanager
def phosd(
    bus: str, folder: Path, *, entering: Sequence[str] = (), **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """The daemon, until the end of the context; by a command that enters other namespaces."""
    with phosd_that_ends(0, bus, folder, entering, **variables) as daemon:
        yield daemon


@contextmanager
def phosd_that_ends(
    status: int, bus: str, folder: Path, entering: Sequence[str] = (), **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """The daemon, which ends with this exit status."""
    command = [*entering, sys.executable, "-m", "phosd.service.main", "--session"]
    command += [f"--state-dir={folder / 'state'}", f"--runtime-dir={folder / 'run'}"]
    command += [f"--config={folder / 'phosd.toml'}"]
    (folder / "phosd.toml").touch()
    environment = os.environ | {"DBUS_SESSION_BUS_ADDRESS": bus} | variables
    log = folder / "phosd.log"
    with log.open("ab") as file:
        before = log.stat().st_size
        daemon = subprocess.Popen(command, env=environment, stderr=file, text=True)
    try:
        wait_until(lambda: b"serves org.phos" in log.read_bytes()[before:], "phosd")
        yield daemon
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert end_of(daemon) == status, log.read_text()


def copy_by_chunks(folder: Path) -> None:
    """Make the movers of the next daemon copy one chunk at a time, however slowly, and on write:
    there is no room for a snapshot.

    A program that waits for its memory gives up when nothing comes for 10 seconds.
    """
    settings = f'ring_bytes = {8 * RECORD}\nshadow_limit = "4 MiB"\n'
    (folder / "phosd.toml").write_text(settings)


def end_of(daemon: subprocess.Popen[str]) -> int:
    """The daemon's exit status. One that does not end writes to its log what each thread does."""
    try:
        return daemon.wait(120)
    except subprocess.TimeoutExpired:
        daemon.send_signal(signal.SIGABRT)
        return daemon.wait(10)


def phos(bus: str, folder: Path, *words: str) -> list[dict[str, object]]:
    """A command of ``phos --json``, which must succeed; its lines."""
    done = phos_ended(bus, folder, "--json", *words)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "phosd.log").read_text()
    return [json.loads(line) for line in done.stdout.splitlines()]


def phos_ended(bus: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command of ``phos``, however it ends."""
    return subprocess.run(
        [sys.executable, "-m", "phosd.cli.main", "--bus", bus, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ
        | {"PHOS_RUNTIME_DIR": str(folder / "run"), "XDG_STATE_HOME": str(folder / "home")},
        check=False,
    )


def clones_beside_it(bus: str, folder: Path, image: str, output: Path) -> None:
    """Two clones are made and compute; of a third it is said that it could be."""
    assert "clone" in {
        check["check"] for check in phos(bus, folder, "restore", image, "--clone", "--dry-run")
    }
    jobs = phos(bus, folder, "restore", image, "--clone", "2")
    pids = [int(str(job["result"])) for job in jobs if job["state"] == "done"]
    try:
        logs = [*output.parent.glob(f"{output.name}.clone-*")]
        assert len(pids) == len(logs) == len(set(pids)) == 2
        before = len(parse(output.read_bytes()))
        for log in logs:
            wait_until(lambda: len(parse(log.read_bytes())) > before, "a clone")  # noqa: B023
        assert {p["pid"] for p in phos(bus, folder, "ps")} >= {*pids}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.always
def test_save_kill_and_restore_over_the_bus(bus: str, tmp_path: Path) -> None:
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]
    with phosd(bus, tmp_path):
        (started,) = phos(bus, tmp_path, "run", "--gpu", "soft", "--detach", "--", *single)
        pid, output = int(str(started["pid"])), Path(str(started["stdout"]))
        try:
            wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
            found = [p for p in phos(bus, tmp_path, "ps") if p["pid"] == pid]
            assert [(p["hook"], p["state"]) for p in found] == [("hooked", "running")]

            saved = phos(bus, tmp_path, "checkpoint", str(pid))[-1]
            assert (saved["state"], saved["mode"]) == ("done", "concurrent")
            image = str(saved["result"])
            (listed,) = phos(bus, tmp_path, "images")
            assert (listed["id"], listed["pid"]) == (image, pid)
            reply = busctl(bus, "call", NAME, ROOT, MANAGER, "VerifyImage", "sa{sv}", image, "0")
            job = reply.split('"')[1]
            wait_until(
                lambda: (
                    '"running"'
                    not in busctl(bus, "get-property", NAME, job, "org.phos.Job1", "State")
                ),
                "the verification",
            )
            assert '"done"' in busctl(bus, "get-property", NAME, job, "org.phos.Job1", "State")

            position = output.stat().st_size
            wait_until(lambda: len(parse(output.read_bytes()[position:])) > 10, "it to compute on")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not alive(pid), "its end")
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
    expected = parse(output.read_bytes())

    with phosd(bus, tmp_path):  # another daemon: an image needs nothing of the one that made it
        position = output.stat().st_size
        checks = phos(bus, tmp_path, "restore", image, "--gpu", "1", "--dry-run")
        assert "GPU 1 in place of GPU 0" in str(checks)
        restored = phos(bus, tmp_path, "restore", image, "--gpu", "0=1")[-1]
        assert (restored["result"], restored["destination"]) == (str(pid), "0=1")
        try:
            wait_until(
                lambda: len(parse(output.read_bytes()[position:]).keys() & expected.keys()) > 5,
                "the restored program",
            )
            clones_beside_it(bus, tmp_path, image, output)
            (there,) = [p for p in phos(bus, tmp_path, "ps") if p["pid"] == pid]
            assert "'ordinal': 1" in str(there["gpus"])
            rehearsed = phos(bus, tmp_path, "verify", image, "--rehearse")[-1]
            assert (rehearsed["state"], rehearsed["mode"]) == ("done", "rehearsed")
            (listed,) = phos(bus, tmp_path, "images")
            assert listed["rehearsed"] and listed["rehearsal_error"] is None
        finally:
            os.kill(pid, signal.SIGKILL)
        again = parse(output.read_bytes()[position:])
        common = again.keys() & expected.keys()
        assert {step: again[step] for step in common} == {s: expected[s] for s in common}
        operations = [row["operation"] for row in phos(bus, tmp_path, "history")]
        assert operations == ["verify", *["restore"] * 3, "verify", "checkpoint"]
        phos(bus, tmp_path, "rm", image)
        assert phos(bus, tmp_path, "images") == []


def test_a_schedule_outlives_the_daemon_and_ends_with_the_program(bus: str, tmp_path: Path) -> None:
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]

    def images() -> list[str]:
        return [str(image["id"]) for image in phos(bus, tmp_path, "images")]

    def rehearsed() -> list[object]:
        found = phos(bus, tmp_path, "images")
        assert not any(image["rehearsal_error"] for image in found), found
        return [image["rehearsed"] for image in found]

    def intervals() -> list[object]:
        """Return the program's; others on this machine do not matter."""
        found = phos(bus, tmp_path, "ps")
        return [p["checkpoint_interval"] for p in found if p["pid"] == pid]

    with phosd(bus, tmp_path):
        (started,) = phos(bus, tmp_path, "run", "--gpu", "soft", "--detach", "--", *single)
        pid, output = int(str(started["pid"])), Path(str(started["stdout"]))
        try:
            wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
            by_hand = phos(bus, tmp_path, "checkpoint", str(pid))[-1]["result"]
            schedule = ("--every", "2s", "--keep", "2", "--rehearse")
            phos(bus, tmp_path, "checkpoint", str(pid), *schedule)
            first = images()[-1]
            wait_until(lambda: len(images()) == 3, "the second one of the schedule")
            wait_until(lambda: any(rehearsed()), "a rehearsal")
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
    with phosd(bus, tmp_path):
        try:
            wait_until(lambda: first not in images(), "the first one to make room")
            assert by_hand in images()
            assert intervals() == [2]
        finally:
            os.kill(pid, signal.SIGKILL)
        expected = parse(output.read_bytes())
        wait_until(lambda: intervals() == [], "the end of the process")
        wait_until(
            lambda: all(job["state"] != "running" for job in phos(bus, tmp_path, "jobs")),
            "the last job",
        )
        assert all(job["scheduled"] for job in phos(bus, tmp_path, "jobs"))

        # The last one may have been made just before the end: nothing of it could be compared.
        position = output.stat().st_size
        earlier = images()[-2]
        phos(bus, tmp_path, "verify", earlier)
        restored = phos(bus, tmp_path, "restore", earlier)[-1]
        assert restored["result"] == str(pid)
        assert f"`phos checkpoint {pid} --every 2s --keep 2` begins" in str(restored["notes"])
        try:
            wait_until(
                lambda: len(parse(output.read_bytes()[position:]).keys() & expected.keys()) > 2,
                "the restored program",
            )
            assert intervals() == [None]
            (shown,) = [p for p in phos(bus, tmp_path, "ps") if p["pid"] == pid]
            assert shown["last_image"] == earlier
        finally:
            os.kill(pid, signal.SIGKILL)
        again = parse(output.read_bytes()[position:])
        common = again.keys() & expected.keys()
        assert {step: again[step] for step in common} == {s: expected[s] for s in common}


def test_what_stands_by_becomes_the_mover_and_ends_with_phosd(bus: str, tmp_path: Path) -> None:
    (tmp_path / "phosd.toml").write_text("standby_movers = true\n")
    runtime = tmp_path / "run"
    with phosd(bus, tmp_path):
        wait_until(
            lambda: len(listeners(runtime)) == len(phos(bus, tmp_path, "gpus")), "one for each GPU"
        )
        standbys = listeners(runtime)
        target = start("single", tmp_path, runtime=runtime)
        try:
            target.wait_for_steps(2)
            wait_until(
                lambda: (
                    target.pid in (shown := {p["pid"] for p in phos(bus, tmp_path, "ps")})
                    and not standbys & shown
                ),
                "the program, and none of them, on the bus",
            )
            assert phos(bus, tmp_path, "suspend", str(target.pid))[-1]["state"] == "done"
            wait_until(lambda: len(listeners(runtime) - standbys) == 1, "another in its place")
            assert len(listeners(runtime) & standbys) == len(standbys) - 1
            assert phos(bus, tmp_path, "resume", str(target.pid))[-1]["state"] == "done"
            target.wait_for_steps(2)
        finally:
            target.kill()
    assert not listeners(runtime)


def test_a_rule_of_the_configuration_begins_a_schedule_when_it_is_read_again(
    bus: str, tmp_path: Path
) -> None:
    config, log = tmp_path / "phosd.toml", tmp_path / "phosd.log"

    def read_again(daemon: subprocess.Popen[str], text: str, answer: str) -> None:
        config.write_text(text)
        daemon.send_signal(signal.SIGHUP)
        wait_until(lambda: answer in log.read_text(), answer)

    with phosd(bus, tmp_path) as daemon:
        target = start("single", tmp_path, runtime=tmp_path / "run")
        try:
            target.wait_for_steps(2)

            def intervals() -> list[object]:
                found = phos(bus, tmp_path, "ps")
                return [p["checkpoint_interval"] for p in found if p["pid"] == target.pid]

            wait_until(lambda: intervals() == [None], "the program on the bus")
            rule = '[[periodic]]\ncommand = "*single.py*"\nevery = 3600\n'
            read_again(daemon, rule + "speed = 1\n", "the configuration stays as it was")
            assert f"{config}:4: periodic.speed: is not a setting" in log.read_text()
            read_again(daemon, 'criu = "/other"\n' + rule, "criu takes effect when phosd starts")
            wait_until(lambda: intervals() == [3600], "the schedule")
            phos(bus, tmp_path, "checkpoint", str(target.pid), "--every", "off")
            read_again(daemon, rule, f"{config} was read again")
            time.sleep(1)
            assert intervals() == [None], "what was ended by hand stays ended"
        finally:
            target.kill()


def test_a_process_without_a_gpu_is_refused(bus: str, tmp_path: Path) -> None:
    nothing = subprocess.DEVNULL
    with phosd(bus, tmp_path):
        plain = subprocess.Popen(
            ["sleep", "60"], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
        try:
            with pytest.raises(AssertionError) as caught:
                phos(bus, tmp_path, "checkpoint", str(plain.pid))
            assert '"NoSuchProcess"' in str(caught.value)
            assert "is a GPU process" in str(caught.value)
            assert alive(plain.pid)
        finally:
            plain.kill()
            plain.wait()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_no_gpu_and_no_software_gpu(bus: str, tmp_path: Path) -> None:
    """Every command that needs a GPU says that there is none; the others work."""
    absent = {"PHOS_GPU": "real", "LD_LIBRARY_PATH": str(tmp_path)}
    with phosd(bus, tmp_path, **absent), a_program(tmp_path) as target:
        for words in (["ps"], ["checkpoint", str(target.pid)]):
            with pytest.raises(AssertionError) as caught:
                phos(bus, tmp_path, *words)
            assert '"Unsupported"' in str(caught.value)
            assert "install the NVIDIA driver" in str(caught.value)
        with pytest.raises(RuntimeError, match="install the NVIDIA driver"):
            busctl(bus, "call", NAME, ROOT, MANAGER, "ListGPUs")
        target.more_steps(2)
        assert phos(bus, tmp_path, "images") == []
        (job,) = phos(bus, tmp_path, "jobs")
        assert (job["state"], job["error"]) == ("failed", "Unsupported")
    assert "Traceback" not in (tmp_path / "phosd.log").read_text()


@contextmanager
def a_program(folder: Path) -> Iterator[Target]:
    """A program on the software GPU, which the daemon of the test above does not know of."""
    target = start("single", folder, runtime=folder / "run")
    try:
        target.wait_for_steps(2)
        yield target
    finally:
        target.kill()
