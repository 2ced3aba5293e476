"""A process whose memory cannot be looked at, because of a file system that its user serves."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.program import process
from phosd.engine.recovery.stranded import stranded
from phosd.engine.system import procfs, unkillable_reads
from phosd.engine.system.unkillable_reads import AbandonableThreads
from tests.support.hanging_folder import HangingFolder, hanging_folder

TRAP = """
import ctypes, mmap, os, sys, threading, time
file = os.open(sys.argv[1], os.O_RDONLY)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
at = libc.mmap(None, 4096, 1, 1, file, ctypes.c_long(0))    # shared, to be read
print("mapped", flush=True)
sys.stdin.readline()
memory = os.open("/proc/self/mem", os.O_RDONLY)
threading.Thread(target=os.pread, args=(memory, 1, at)).start()    # holds the lock, and waits
time.sleep(0.3)
libc.mmap(None, 1 << 30, 0, 0x22, -1, ctypes.c_long(0))    # wants it, and all after it wait
"""


@contextmanager
def trap(folder: Path, server: HangingFolder) -> Iterator[int]:
    """A process that nobody can look at; its pid."""
    words = [sys.executable, "-c", TRAP, str(folder / "file")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trapping:
        assert trapping.stdin is not None and trapping.stdout is not None
        assert trapping.stdout.readline() == b"mapped\n"
        server.hang()
        trapping.stdin.write(b"\n")
        trapping.stdin.flush()
        time.sleep(1)
        try:
            yield trapping.pid
        finally:
            server.answer()
            trapping.kill()


def look(pid: int) -> tuple[str, ...]:
    """Return the command of a process, which is read from its memory."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return procfs.command_line(pid)
    return ()


def test_a_process_that_nobody_can_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unkillable_reads, "TIMEOUT", 0.5)
    folder = tmp_path / "far"
    folder.mkdir()
    with hanging_folder(folder) as server:
        (folder / "file").write_bytes(b"x" * 4096)
        with trap(folder, server) as pid:
            alone = threading.Thread(target=look, args=(pid,), daemon=True)
            alone.start()
            alone.join(1)
            assert alone.is_alive(), "it is no trap"
            began = time.monotonic()
            seen = dict(AbandonableThreads().each(procfs.pids(), look))
            assert pid not in seen
            assert seen
            assert time.monotonic() - began < 20
            # Newer kernels tell what it maps, though not its command.
            monkeypatch.setattr(process, "uses_cuda", lambda pid: not look(pid))
            (told,) = [each for each in stranded(tmp_path / "run") if each.pid == pid]
            assert not told.certain
            assert unkillable_reads.at_once([pid, os.getpid()], look, 3).keys() == {os.getpid()}
        alone.join(30)
        assert not alone.is_alive()
