"""What a runtime's CRIU asks of phosd, asked here without one: whoever dies, the program runs."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from phosd.engine.digest import DigestKey
from phosd.engine.image.mac import sealed, unsealed
from phosd.service.tasks.runtime_checkpoints import SOCKET
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.node.containers.conftest import place, undisturbed
from tests.support.harness import Target, running, start, wait_until
from tests.support.service import bus
from tests.system.service.test_end_to_end import phos, phosd

__all__ = ["bus", "place", "undisturbed"]


def connected(place: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(place / "run" / SOCKET))
    connection.settimeout(30)
    return connection


def ask(connection: socket.socket, text: str, folder: Path | None = None) -> str:
    """Send a request, with a folder if it is the first one; the answer."""
    if folder is None:
        connection.send(text.encode())
    else:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        socket.send_fds(connection, [text.encode()], [descriptor])
        os.close(descriptor)
    return connection.recv(5000).decode()


def state(bus: str, place: Path, target: Target) -> object:
    return next(row["state"] for row in phos(bus, place, "ps") if row["pid"] == target.pid)


def job_phases(bus: str, place: Path) -> list[str]:
    """The phases of the last checkpoint, in which the program ran, that came after its stop."""
    (*_, job) = phos(bus, place, "jobs")
    (told,) = phos(bus, place, "jobs", str(job["job"]))
    phases = told["phases"]
    assert isinstance(phases, list)
    last = max(n for n, phase in enumerate(phases) if phase["stopped"])
    return [phase["name"] for phase in phases[last + 1 :]]


def of_another_version(manifest: Path, secret: Path) -> None:
    """Make a manifest one that another phosd has written with the same secret."""
    key = DigestKey(secret.read_bytes()).packed
    body = unsealed(key, manifest.read_bytes())
    assert body is not None
    text = json.dumps(json.loads(body) | {"format": 99, "phosd": "9.9"}).encode()
    manifest.write_bytes(sealed(key, text))


@pytest.mark.parametrize("begin", ["pause", "snapshot"])
@pytest.mark.parametrize("requests", [[], ["save"], ["save", "end"]])
def test_criu_has_gone(
    requests: list[str], begin: str, bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    target = start("single", place, runtime=place / "run")
    try:
        with phosd(bus, place):
            target.wait_for_steps(2)
            with connected(place) as connection:
                assert ask(connection, f"{begin} {target.pid}", place / "image") == "paused"
                paused = "suspended" if begin == "pause" else "running"
                assert state(bus, place, target) == paused
                for request in requests:
                    assert not ask(connection, request).startswith("error")
                assert bool([*(place / "image").glob("phos-*")]) == bool(requests)
            computes_right(target, undisturbed)
            assert state(bus, place, target) == "running"
    finally:
        target.kill()


def test_what_runs_on_is_written_when_it_runs_again(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """But before CRIU is told so."""
    target = start("single", place, runtime=place / "run")
    try:
        with phosd(bus, place):
            target.wait_for_steps(2)
            with connected(place) as connection:
                assert ask(connection, f"snapshot {target.pid}", place / "image") == "paused"
                position = target.position()
                assert ask(connection, "save") == "noted"
                (begun,) = (place / "image").glob("phos-*")
                assert target.position() == position
                assert ask(connection, "end") == "ended"
                assert ask(connection, "await") == "saved"
                assert begun.with_suffix(".json").exists()
            assert job_phases(bus, place) == ["drain", "publish", "write"]
            computes_right(target, undisturbed)
    finally:
        target.kill()


def test_a_folder_that_is_used_again_has_the_last_memory(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """As podman does it, which has CRIU write over its files."""
    target = start("single", place, runtime=place / "run")
    try:
        with phosd(bus, place):
            found: list[Path] = []
            for _ in range(2):
                target.more_steps(2)
                with connected(place) as connection:
                    assert ask(connection, f"pause {target.pid}", place / "image") == "paused"
                    assert ask(connection, "save") == "saved"
                (manifest,) = (place / "image").glob("phos-*.json")
                found.append(manifest)
            assert found[0] != found[1]
            computes_right(target, undisturbed)
            of_another_version(found[1], place / "state/secret")
            with connected(place) as connection:
                told = ask(connection, f"restored {target.pid}", place / "image")
                assert "was made by phosd 9.9 in format 99; this is phosd" in told
            (place / "image/phos-20200101T000000-0000.json").touch()
            with connected(place) as connection:
                told = ask(connection, f"restored {target.pid}", place / "image")
                assert "device memory of several times" in told
    finally:
        target.kill()


@pytest.mark.parametrize("begin", ["pause", "snapshot"])
def test_phosd_has_gone(begin: str, bus: str, place: Path, undisturbed: Undisturbed) -> None:
    """The next one brings the program back."""
    target = start("single", place, runtime=place / "run")
    try:
        with pytest.raises(AssertionError), phosd(bus, place) as daemon:
            target.wait_for_steps(2)
            connection = connected(place)
            assert ask(connection, f"{begin} {target.pid}", place / "image") == "paused"
            daemon.send_signal(signal.SIGKILL)
            assert connection.recv(5000) == b""
        with phosd(bus, place):
            computes_right(target, undisturbed)
    finally:
        target.kill()


@pytest.mark.parametrize("begin", ["pause", "snapshot"])
def test_the_runtimes_command_has_timed_out(begin: str, bus: str, place: Path) -> None:
    """Its CRIU is killed while phosd waits for a safe point: nobody waits for that any more."""
    (place / "phosd.toml").write_text("callback_deadline = 600\n")
    target = start("safe_points", place, runtime=place / "run", arguments=("0", "seldom"))
    try:
        with phosd(bus, place):
            target.wait_for_steps(2)
            with connected(place) as connection:
                folder = os.open(place, os.O_RDONLY)
                socket.send_fds(connection, [f"{begin} {target.pid}".encode()], [folder])
                os.close(folder)
                wait_until(lambda: phos(bus, place, "jobs"), "the job")
            wait_until(lambda: phos(bus, place, "jobs")[-1]["state"] == "cancelled", "its end")
            target.more_steps(2)
            assert state(bus, place, target) == "running"
    finally:
        target.kill()


def test_what_makes_no_sense_is_refused(bus: str, place: Path) -> None:
    with phosd(bus, place):
        connection = connected(place)
        for request in (
            "save",
            "end",
            "await",
            "pause",
            "pause -1",
            "snapshot 1",
            "restored 1",
            "\x00",
        ):
            assert ask(connection, request).startswith("error"), request
        with running(["sleep", "60"]) as other:
            assert ask(connection, f"restored {other.pid}", place / "image") == "nothing"
            assert ask(connection, f"pause {other.pid}") == "nothing"
            other.kill()
        assert ask(connection, "pause 4194304").startswith("error")
        connection.close()
        assert (place / "run" / SOCKET).stat().st_mode & 0o777 == 0o600
