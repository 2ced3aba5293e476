"""What /proc says, whatever names users have chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phosd.engine.program import tree
from phosd.engine.system import mounts, procfs

ENDS = [b"\r", b"\f", b"\x0b", b"\x1c", b"\x1e", b"\xc2\x85", b"\xe2\x80\xa8"]
"""Ends of a line for Python, not for the kernel (which escapes its own)."""


@pytest.mark.parametrize("part", [*ENDS, b"\xff"])
def test_a_mount_point_with_any_name(
    part: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_bytes(
        b"66 45 8:1 / /mnt/a%bb rw,relatime - ext4 /dev/sda rw\n" % part
        + b"67 45 0:40 / /mnt/a%bb rw,relatime - tmpfs x rw\n" % part
    )
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    assert mounts.memory_devices() == {os.makedev(0, 40)}


@pytest.mark.parametrize("name", [b"\rShdPnd:\t100", b"\x1eTgid", b"\xff\x1e:"])
def test_a_process_with_any_name(name: bytes) -> None:
    """One that seemed to be killed already would be in nobody's way."""
    code = f"open('/proc/self/comm', 'wb').write({name!r}); print(flush=True); input()"
    with subprocess.Popen(
        ["/usr/bin/python3", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as named:
        assert named.stdout is not None
        named.stdout.readline()
        try:
            assert not procfs.ending(named.pid)
            assert procfs.status(named.pid).process == named.pid
        finally:
            named.kill()


@pytest.mark.parametrize("end", ENDS)
def test_a_cgroup_with_any_name(
    end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_bytes(b"1:cpu:/a%bb\n0::/user/a%bb\n" % (end, end))
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    assert tree._cgroup(7) == f"/user/a{end.decode()}b"


ANOTHER_COMMAND = """
import ctypes, mmap, os, sys
memory = mmap.mmap(-1, 1 << 32, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
with open("/proc/self/stat") as file:
    words = file.read().rpartition(")")[2].split()
code, end_code, stack = (int(words[n - 3]) for n in (26, 27, 28))
data, end_data, brk = (int(words[n - 3]) for n in (45, 46, 47))
where = (ctypes.c_uint64 * 12)(
    code, end_code, data, end_data, brk, libc.sbrk(0), stack,
    start, start + (1 << 32), start, start + (1 << 32), 0)
made = bytes(where) + (0).to_bytes(4, "little") + (0xFFFFFFFF).to_bytes(4, "little")
if libc.prctl(35, 14, made, len(made), 0) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_may_say_that_anything_is_its_command() -> None:
    """Four GiB of zeros here; it needs no right to do so (prctl(2), PR_SET_MM_MAP)."""
    words = [sys.executable, "-c", ANOTHER_COMMAND]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(procfs.command_line(process.pid)) <= 1 + (8 << 10)
        assert len(procfs.environment(process.pid)) <= 1 + (6 << 20)
        assert procfs.describe(process.pid).startswith(f"pid {process.pid} (")
        assert len(procfs.describe(process.pid)) < 200
        process.communicate()
