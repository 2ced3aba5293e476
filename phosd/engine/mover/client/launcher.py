"""Find or start the process of a mover, and watch it."""

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from phosd.engine.mover.protocol.connection import Connection
from phosd.engine.mover.protocol.endpoint import connect, folder_of, path_of
from phosd.engine.system.native import python_environment
from phosd.errors import Internal, Timeout

MOVER_UNIT = "PHOS_MOVER_UNIT"
"""Environment variable of phosd under systemd: the template of the movers' unit."""
START_SECONDS = 120.0
"""``cuInit`` can take seconds, pinning half a second per GB."""
_LOOK_SECONDS = 0.01

Child = subprocess.Popen[bytes]


def connections(
    gpu: int, ring_bytes: int, runtime_dir: Path, child: Child | None = None
) -> Iterator[tuple[Connection, Child | None]]:
    """Yield a connection to the mover of a GPU, the one that runs in ``runtime_dir`` or a new one,
    with the process that was started for it, if one was; and another one if that mover was about to
    end. ``child`` is such a process from before.

    Raises :class:`Internal` and :class:`Timeout` if no mover starts.
    """
    folder_of(runtime_dir)
    deadline = time.monotonic() + START_SECONDS
    while True:
        connection = connect(path_of(runtime_dir, gpu))
        if connection is not None:
            yield connection, child
        if child is None or child.poll() == 0:  # another mover was there, which is ending
            child = launch(gpu, ring_bytes, runtime_dir)
        elif child.poll() is not None:
            raise Internal(
                f"the data mover of GPU {gpu} ended with status {child.returncode}",
                hint=f"see {log_of(gpu)} for the reason",
            )
        if time.monotonic() > deadline:
            child.kill()
            child.wait()
            raise Timeout(
                f"the data mover of GPU {gpu} did not start within {START_SECONDS:.0f} s",
                hint=f"see {log_of(gpu)}, and the driver's log (dmesg)",
            )
        time.sleep(_LOOK_SECONDS)


def launch(gpu: int, ring_bytes: int, runtime_dir: Path) -> Child:
    """Start the mover of a GPU: as its unit, or in a session of its own.

    It listens a moment later; a unit listens once the returned process has ended.
    """
    if template := os.environ.get(MOVER_UNIT):
        _write_environment(runtime_dir / "mover" / f"{gpu}.env", ring_bytes)
        unit = template.replace("@", f"@{gpu}")
        return subprocess.Popen(
            ("/usr/bin/systemctl", "start", unit), stdin=subprocess.DEVNULL, start_new_session=True
        )
    return subprocess.Popen(
        (
            *(sys.executable, "-P", "-m", "phosd.engine.mover"),
            *(f"--gpu={gpu}", f"--ring={ring_bytes}", f"--runtime-dir={runtime_dir}"),
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=python_environment(),
        cwd="/",
        start_new_session=True,
    )


def log_of(gpu: int) -> str:
    """Describe where the mover of a GPU logs, for a hint."""
    return f"`journalctl -u phosd-mover@{gpu}` (without systemd: phosd's log)"


def _write_environment(path: Path, ring_bytes: int) -> None:
    """Write the variables that the mover's unit cannot know: the ring size, and ``PHOS_...``."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("PHOS_")}
    variables["PHOS_MOVER_RING"] = str(ring_bytes)
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in variables.items()]
    path.write_text("".join(lines))


class MoverProcess:
    """A running mover. ``child`` is the process that started it, if this engine did."""

    def __init__(self, pid: int, child: Child | None = None) -> None:
        self.pid = pid
        self._child = child if child is not None and child.pid == pid else None
        self._ended = os.pidfd_open(pid)

    @property
    def running(self) -> bool:
        """Whether the mover has not ended."""
        return not self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait until the mover has ended. Returns whether it has."""
        poller = select.poll()
        poller.register(self._ended, select.POLLIN)
        if not poller.poll(seconds * 1000):
            return False
        if self._child is not None:
            self._child.wait()  # collects its status, so that no zombie stays
        return True

    @property
    def ended_well(self) -> bool:
        """Whether it has ended, or is about to, without a known failure."""
        return self.wait(1) and (self._child is None or self._child.returncode == 0)

    def end(self) -> str:
        """Describe how the mover ended, after a moment to do so."""
        if not self.wait(1):
            return "no longer answers"
        return "has ended" if self._child is None else f"ended with status {self._child.wait()}"

    def kill(self) -> None:
        """Kill the mover."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)

    def close(self) -> None:
        """Release the resources of this object; the mover may run on."""
        os.close(self._ended)
