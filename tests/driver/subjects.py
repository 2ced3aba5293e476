"""Start the processes of a probe, and tell them what to do."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phosd.engine.system.cuda import is_software
from phosd.engine.system.native import softgpu_folder
from tests.driver import MESSAGE
from tests.support.checkout import ROOT
from tests.support.harness import PATIENCE, environment, wait_until

MIB = 1 << 20
WORKS = "use(); p = ck(d.cuMemAlloc(SIZE)); fill(p, 3); assert holds(p, 3)"
"""Code of a process that has memory and has worked with it."""
GOES_ON = "holds(p, 3) and fill(p, 3) is None"
"""Whether it has what it had, and works on."""
A_WHILE = 0.3
"""Seconds after which a call that has not returned is one that waits."""
_SOFTWARE_DEVICE = "/dev/zero"
"""A device that the software GPU has open and mapped, as the driver has its own."""


class Subject:
    """A process that runs code which it is told. Each name of :mod:`tests.driver.inside` is there,
    and what the code defines stays.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.pid = int(self.answer())

    def ask(self, code: str, *, given: int | None = None) -> Any:
        """Run code, and return its value. ``given`` is a descriptor that it then has by this name.

        Fails if the code raises, with the traceback, or if it does not end in time.
        """
        self.tell(code, given=given)
        return self.answer()

    def do(self, call: str) -> str:
        """Return what the driver answers a call, such as ``SUCCESS``."""
        return str(self.ask(f"code({call})"))

    def give(self, code: str) -> int:
        """Return the descriptor that code evaluates to; the caller closes it."""
        self._send(code, descriptor=True)
        descriptors: list[int] = []
        self._receive(PATIENCE, descriptors)
        return descriptors[0]

    def tell(self, code: str, *, given: int | None = None) -> None:
        """Send code, and do not wait for its end."""
        self._send(code, descriptor=False, given=given)

    def answer(self) -> Any:
        """Return what the code that it was told evaluates to."""
        return self._receive(PATIENCE, [])

    def is_silent(self, seconds: float = A_WHILE) -> bool:
        """Return whether the answer does not come in so many seconds."""
        return not select.select([self._channel], [], [], seconds)[0]

    def kill(self) -> None:
        """End the process, and wait until it is gone."""
        if self._channel.fileno() < 0:  # it is gone, and its pid may be another's
            return
        self._channel.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        gone = Path(f"/proc/{self.pid}")
        wait_until(lambda: not gone.exists(), f"process {self.pid} to be gone")

    def _send(self, code: str, *, descriptor: bool, given: int | None = None) -> None:
        request = json.dumps({"code": code, "descriptor": descriptor}).encode()
        socket.send_fds(self._channel, [request], [] if given is None else [given])

    def _receive(self, seconds: float, descriptors: list[int]) -> Any:
        assert not self.is_silent(seconds), f"no answer in {seconds:.0f} s: a call does not return"
        try:
            message, received, _, _ = socket.recv_fds(self._channel, MESSAGE, 1)
        except ConnectionResetError:
            message, received = b"", []
        assert message, "the process of the probe has ended: see dmesg for a fault in the driver"
        descriptors += received
        answer = json.loads(message)
        assert "error" not in answer, answer["error"]
        return answer["value"]


class Control(Subject):
    """A process without a context that checkpoints others. Each step returns what the driver
    answered.
    """

    def state(self, pid: int) -> str:
        return str(self.ask(f"state({pid})"))

    def lock(self, pid: int, milliseconds: int = 10_000) -> str:
        return str(self.ask(f"lock({pid}, {milliseconds})"))

    def checkpoint(self, pid: int) -> str:
        return self.do(f"d.cuCheckpointProcessCheckpoint({pid}, None)")

    def restore(self, pid: int, pairs: Sequence[tuple[int, int]] = ()) -> str:
        return str(self.ask(f"restore({pid}, {list(pairs)})"))

    def unlock(self, pid: int) -> str:
        return self.do(f"d.cuCheckpointProcessUnlock({pid}, None)")

    def restore_thread(self, pid: int) -> int:
        return int(self.ask(f"ck(d.cuCheckpointProcessGetRestoreThreadId({pid}))"))

    def save(self, pid: int) -> None:
        """Lock a process and checkpoint it; both must succeed."""
        assert (self.lock(pid), self.checkpoint(pid)) == ("SUCCESS", "SUCCESS")

    def bring_back(self, pid: int, pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Restore a process and unlock it; both must succeed."""
        assert (self.restore(pid, pairs), self.unlock(pid)) == ("SUCCESS", "SUCCESS")


class Origin:
    """Starts them. Those of the software GPU use an account in ``folder``."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        settings = {"PYTHONPATH": str(ROOT)}
        if is_software():
            settings["PHOS_SOFTGPU_DIR"] = str(folder / "gpu")
            settings["PHOS_SOFTGPU_DEVICE_FILE"] = _SOFTWARE_DEVICE
            settings["PHOS_TEST_NVML"] = str(softgpu_folder() / "nvml/libnvidia-ml.so.1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.driver.inside", str(theirs.fileno())],
                env=environment(hooked=False, extra=settings),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def start(self, **settings: str) -> socket.socket:
        """Start a process with these variables, and return its channel."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps(settings).encode()
            socket.send_fds(self._channel, [request], [theirs.fileno()])
        return ours

    def end(self) -> None:
        """End the process that starts the others, and with it those that are left."""
        self._channel.close()
        self._process.wait(PATIENCE)


@contextmanager
def kept(descriptor: int) -> Iterator[int]:
    """Close a descriptor that a process gave at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def devices(pid: int) -> list[str]:
    """Return the driver's devices that a process has open or mapped."""
    return [name for name in _files(pid) if name.startswith(_beginning())]


def mapped_devices(pid: int) -> list[str]:
    """Return the lines of a process's memory map that name the driver's devices."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if f" {_beginning()}" in line]


def _beginning() -> str:
    return _SOFTWARE_DEVICE if is_software() else "/dev/nvidia"


def _files(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        yield str(link.readlink())
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        yield line.partition("/")[1] + line.partition("/")[2]
