"""Probe whether this CRIU works here: dump and restore a small program, and see it run on.

``criu check`` is no test: it passes on kernels where no process with a socket can be dumped. The
result is cached until the program, the kernel or the boot changes.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from phosd.engine.criu.dump.dump import DumpOptions, dump_tree
from phosd.engine.criu.restore.admission import admission
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restore import restore_tree
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.run.program import INSTALL_HINT, Criu
from phosd.engine.program.tree import scan
from phosd.engine.system import procfs
from phosd.errors import Internal, PhosError

CACHE = Path("/var/cache/phos")
TIMEOUT = 10.0
"""Seconds that the probe's program has for each step."""

_PROGRAM = """
import mmap, os, socket, sys, threading, time
reader, writer = os.pipe()
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
listener = socket.create_server(("127.0.0.1", 0))
idle = socket.create_connection(listener.getsockname()), listener.accept()
near, far = socket.socketpair()
memory = mmap.mmap(-1, mmap.PAGESIZE)
def answer():
    while True:
        client, _ = listener.accept()
        client.sendall(b"here")
        client.close()
threading.Thread(target=answer, daemon=True).start()
if os.fork() == 0:
    while True:
        far.send(far.recv(8))
log = open(sys.argv[1], "a")
print(listener.getsockname()[1], file=log, flush=True)
while True:
    value = int.from_bytes(memory[:8], "little") + 1
    memory[:8] = value.to_bytes(8, "little")
    os.write(writer, memory[:8])
    near.send(os.read(reader, 8))
    datagrams.sendto(near.recv(8), datagrams.getsockname())
    print(int.from_bytes(datagrams.recv(8), "little"), file=log, flush=True)
    time.sleep(0.005)
"""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of the probe, which took ``seconds``. ``reason`` is empty if CRIU works."""

    version: str
    reason: str
    seconds: float

    @property
    def works(self) -> bool:
        return not self.reason


def probe(criu: Criu, cache: Path = CACHE) -> Verdict:
    """Return whether ``criu`` can dump and restore here. Cached in the folder ``cache``.

    Takes about half a second if nothing is cached. A CRIU that fails raises nothing.
    """
    remembered = cache / f"criu-probe-{_fingerprint(criu)}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):  # missing or damaged: probe again
        return msgspec.json.decode(remembered.read_bytes(), type=Verdict)
    begin = time.monotonic()
    reason = _attempt(criu)
    verdict = Verdict(criu.version, reason, round(time.monotonic() - begin, 3))
    with contextlib.suppress(OSError):  # a read-only cache costs time only
        cache.mkdir(parents=True, exist_ok=True, mode=0o755)
        remembered.write_bytes(msgspec.json.encode(verdict))
    return verdict


def require_working(criu: Criu, cache: Path = CACHE) -> Criu:
    """Return ``criu`` if it works here. Raises :class:`Internal` with what failed."""
    verdict = probe(criu, cache)
    if not verdict.works:
        raise Internal(
            f"CRIU {verdict.version} at {criu.path} does not work on this machine: "
            f"{verdict.reason}",
            hint=INSTALL_HINT,
        )
    return criu


def _fingerprint(criu: Criu) -> str:
    status = criu.path.stat()
    parts = (status.st_ino, status.st_size, status.st_mtime_ns, os.uname().release)
    return "-".join(map(str, parts)) + "-" + procfs.boot_id()


def _attempt(criu: Criu) -> str:
    with tempfile.TemporaryDirectory(prefix="phos-probe-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        log = folder / "log"
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _cycle(criu, started, folder, log)
        except PhosError as error:
            return str(error)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _cycle(criu: Criu, started: subprocess.Popen[bytes], folder: Path, log: Path) -> str:
    _wait_for_lines(log, 4)
    images = folder / "images"
    images.mkdir()
    dump = dump_tree(criu, scan(started.pid), images, DumpOptions(tcp="close"))
    record = dump.record("images")
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    # Remove what the program counted after the dump, or the numbers would not be consecutive.
    os.truncate(log, dump.details.open_files[0].size)
    processes = [process.record(0) for process in dump.tree]
    saved = SavedTree(record, processes, images)
    admission(criu, saved, TreeRestoreOptions())
    restored = restore_tree(criu, saved, TreeRestoreOptions())
    try:
        port, *values = _wait_for_lines(log, len(log.read_text().split()) + 3)
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as client:
            answer = client.recv(4)
    finally:
        restored.abandon()
    if values != list(range(1, len(values) + 1)):
        return "the restored program lost count"
    return "" if answer == b"here" else "the restored program does not listen any more"


def _wait_for_lines(log: Path, count: int) -> list[int]:
    """Wait until the log has at least ``count`` numbers; return them."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        numbers = [int(line) for line in lines if line.endswith("\n")]
        if len(numbers) >= count:
            return numbers
        time.sleep(0.01)
    raise Internal(
        "CRIU's test program does not run on after its restore",
        hint="the machine may be overloaded: try again; `phos doctor` repeats the test",
    )
