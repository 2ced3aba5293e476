"""A real phosd on a private bus that is killed, hangs or fails, and the programs that it saves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from phosd.engine.system import memory_mount
from tests.support.bus import busctl
from tests.support.harness import alive, wait_until

NAME, ROOT, MANAGER = "org.phos", "/org/phos", "org.phos.Manager1"
DIED = "died"
"""Instead of a job's state: the daemon is gone."""
_PATIENCE = 60.0
_LINGER = "3"
"""Seconds after which a mover ends that keeps nothing and that no daemon wants."""


class Plant:
    """One daemon at a time over the folders below ``place``.

    It makes images in memory if ``settings`` (of ``phosd.toml``) say so.
    """

    def __init__(self, bus: str, place: Path) -> None:
        self.settings = ""
        self.bus = bus
        self.place = place
        self.log = place / "phosd.log"
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self, fault: str = "", delay: float = 0, package: Path | None = None) -> None:
        """Start a daemon, in which (and in whose movers) this fault happens, and wait for it.

        ``delay``: the seconds by which each of their steps is delayed at most. ``package``: the
        folder with another phosd's package.
        """
        command = [sys.executable, "-m", "phosd.service.main", "--session"]
        command += [f"--state-dir={self.place / 'state'}", f"--runtime-dir={self.place / 'run'}"]
        command += [f"--config={self.place / 'phosd.toml'}"]
        (self.place / "phosd.toml").write_text(self.settings)
        environment = {k: v for k, v in os.environ.items() if k != "PHOS_FAULT"}
        environment |= {"DBUS_SESSION_BUS_ADDRESS": self.bus, "PHOS_TEST_LINGER": _LINGER}
        if fault:
            environment["PHOS_FAULT"] = fault
        if package:
            environment["PYTHONPATH"] = str(package)
        if delay:
            environment["PHOS_FAULT_DELAY"] = str(delay)
        before = self.said()
        with self.log.open("ab") as file:
            self.daemon = subprocess.Popen(command, env=environment, stderr=file, cwd=package)
        try:
            wait_until(
                lambda: b"serves org.phos" in self.said(before) or self.dead,
                "phosd to come up",
                _PATIENCE,
            )
        except AssertionError:
            self.daemon.send_signal(signal.SIGABRT)  # its log tells what each thread waits for
            self.daemon.wait(_PATIENCE)
            raise
        assert not self.dead, self.log.read_text()

    def said(self, since: bytes = b"") -> bytes:
        """What the daemons have logged, after what was known before."""
        return self.log.read_bytes()[len(since) :] if self.log.exists() else b""

    @property
    def dead(self) -> bool:
        """Whether the daemon has ended."""
        assert self.daemon is not None
        return self.daemon.poll() is not None

    def ends(self) -> bool:
        """Whether the daemon ends within a moment; the bus may be the first to know."""
        assert self.daemon is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.wait(5)
        return self.dead

    def stop(self) -> None:
        """End the daemon as a service manager does."""
        if self.daemon is not None and not self.dead:
            self.daemon.send_signal(signal.SIGTERM)
            assert self.daemon.wait(_PATIENCE) == 0, self.log.read_text()

    def kill(self) -> None:
        """kill -9."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def call(self, member: str, signature: str = "", *arguments: object) -> str:
        """A method of the manager; what busctl prints."""
        words = [signature, *map(str, arguments)] if signature else []
        return busctl(self.bus, "call", NAME, ROOT, MANAGER, member, *words)

    def begin(self, member: str, signature: str, *arguments: object) -> str:
        """Begin a job; its path."""
        return self.call(member, signature, *arguments).split('"')[1]

    def checkpoint(self, pid: int, mode: str, *, durable: bool = False) -> str:
        """Begin a checkpoint; the job's path."""
        options = ("mode", "s", mode, "durable", "b", str(durable).lower())
        return self.begin("Checkpoint", "ua{sv}", pid, 2, *options)

    def state(self, job: str) -> str:
        """The state of a job, or :data:`DIED`."""
        try:
            line = busctl(self.bus, "get-property", NAME, job, "org.phos.Job1", "State")
        except RuntimeError:
            if self.ends():
                return DIED
            raise
        return line.split('"')[1]

    def end_of(self, job: str) -> str:
        """How a job ended."""

        def ended() -> str | None:
            state = DIED if self.dead else self.state(job)
            return None if state in ("running", "queued") else state

        try:
            return wait_until(ended, f"the end of {job}", _PATIENCE, every=0.05)
        except AssertionError:
            assert self.daemon is not None
            self.daemon.send_signal(signal.SIGABRT)  # it then says where its threads are
            self.daemon.wait()
            raise AssertionError(f"{job} does not end:\n{self.log.read_text()}") from None

    def phase_of(self, job: str) -> str:
        """The phase that a job is in; empty when that cannot be told."""
        try:
            line = busctl(self.bus, "get-property", NAME, job, "org.phos.Job1", "Phase")
        except RuntimeError:
            return ""
        return line.split('"')[1]

    def history(self) -> list[dict[str, Any]]:
        """The last jobs, newest first."""
        words = ("call", NAME, ROOT, MANAGER, "ListHistory", "a{sv}", "0")
        rows = json.loads(busctl(self.bus, "--json=short", *words))["data"][0]
        return [{key: value["data"] for key, value in row.items()} for row in rows]

    def last(self) -> dict[str, Any]:
        """The last job, when its end has been recorded: another thread writes that down."""

        def ended() -> dict[str, Any] | None:
            job = self.history()[0]
            return None if job["state"] in ("running", "queued") else job

        return wait_until(ended, "the end of the last job in the history", _PATIENCE, every=0.05)

    def images(self) -> list[str]:
        """The images that can be seen, oldest first."""
        rows = json.loads(
            busctl(self.bus, "--json=short", "call", NAME, ROOT, MANAGER, "ListImages")
        )
        return [row[0] for row in rows["data"][0]]

    def verify(self, image: str) -> str:
        """How the verification of an image ended."""
        return self.end_of(self.begin("VerifyImage", "sa{sv}", image, 0))

    def movers(self) -> list[int]:
        """The movers that run for this place."""
        wanted = f"--runtime-dir={self.place / 'run'}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if wanted in words and b"phosd.engine.mover" in words:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End the daemon and its movers, whatever they are at."""
        if self.daemon is not None and not self.dead:
            self.kill()
        for mover in self.movers():
            os.kill(mover, signal.SIGKILL)
        memory = self.place / "run/memory"
        if memory.is_mount():
            assert memory_mount.unmount(memory) == ""

    def durable(self, image: str) -> bool:
        """Whether an image is on the disk."""
        return (self.place / "state/images" / image / "manifest.json").exists()


def wait_for_fault(plant: Plant, since: bytes, point: str) -> None:
    """Wait until the point has been reached that hangs."""
    wait_until(lambda: f"fault point {point}".encode() in plant.said(since), point, _PATIENCE)


def partial(place: Path) -> list[Path]:
    """What of unfinished images is in the store: folders without a manifest."""
    images = place / "state" / "images"
    return [folder for folder in images.iterdir() if not (folder / "manifest.json").exists()]


def leftovers(place: Path) -> list[Path]:
    """What a settled node does not have: journal files, calls to wake."""
    run = place / "run"
    return [*(run / "journal").iterdir(), *(run / "hook").glob("*.wake")]


def eventually_alone(plant: Plant, patience: float = 40.0) -> None:
    """No mover stays behind."""
    end = time.monotonic() + patience
    while plant.movers() and time.monotonic() < end:
        time.sleep(0.1)
    stay = {pid: _waits(pid) for pid in plant.movers() if alive(pid)}
    assert not stay, f"{stay} stay:\n{plant.said().decode(errors='replace')}"


def _waits(pid: int) -> str:
    """In what a process waits in the kernel."""
    return Path(f"/proc/{pid}/wchan").read_text()
