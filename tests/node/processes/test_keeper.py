"""What the keeper of a pid namespace arranges there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phosd.engine.program import namespace_maker
from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.pid_namespaces import PidNamespace

PROC = """
import ctypes, os, stat, sys
from phosd.engine.program.keeper import mount_proc
libc = ctypes.CDLL(None)
def bind(source, target):
    assert libc.mount(source.encode(), target.encode(), None, 4096, None) == 0
bind(sys.argv[1] + "/figures", "/proc/meminfo")
bind("/proc/sys", "/proc/sys")
assert libc.mount(None, b"/proc/sys", None, 32 | 4096 | 1, None) == 0  # remounted, read-only
os.mkfifo(sys.argv[1] + "/messages", 0o600)
for name, place in (("boot", "/proc/sys/kernel/random/boot_id"), ("messages", "/proc/kmsg")):
    bind(sys.argv[1] + "/" + name, place)
    os.unlink(sys.argv[1] + "/" + name)  # as systemd-nspawn does
ids = mount_proc(sys.argv[1] + "/aside")
assert os.readlink("/proc/self") == "1"
assert open("/proc/meminfo").read() == "the container's"
assert open("/proc/sys/kernel/random/boot_id").read() == "of the container"
messages = os.stat("/proc/kmsg").st_mode
assert (stat.S_ISFIFO(messages), stat.S_IMODE(messages)) == (True, 0o600)
assert not os.listdir(sys.argv[1] + "/aside")
os.pwrite(ids, b"4000", 0)
child = os.fork()
if child == 0:
    os._exit(0)
assert child == 4001
os.waitpid(child, 0)
try:
    open("/proc/sys/kernel/hostname", "w")
except OSError as error:
    sys.exit(error.errno != 30)  # EROFS
"""


def test_what_a_container_covers_in_proc_stays_covered(tmp_path: Path) -> None:
    (tmp_path / "figures").write_text("the container's")
    (tmp_path / "boot").write_text("of the container")
    (tmp_path / "aside").mkdir()
    unshared = ("unshare", "--mount", "--pid", "--fork")  # private: nobody else sees the mounts
    done = subprocess.run([*unshared, sys.executable, "-c", PROC, str(tmp_path)], check=False)
    assert done.returncode == 0


def test_a_keeper_that_ends_just_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the last process of its namespace, which a failed restore kills as well."""
    child = subprocess.Popen(["sleep", "1000"])
    keeper = procfs.process_id(child.pid)
    assert keeper is not None

    def lived(namespace: PidNamespace) -> bool:
        child.kill()
        child.wait()
        return True

    monkeypatch.setattr(PidNamespace, "lives", property(lived))
    namespace_maker.end(PidNamespace(keeper))


def test_a_thread_that_ends_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the members of a namespace are read, threads end: only these are missing."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    threads = procfs.threads
    monkeypatch.setattr(procfs, "threads", lambda pid: (gone.pid, *threads(pid)))
    name = procfs.namespace(os.getpid(), "pid")
    assert os.getpid() in pid_namespaces.members([name])[name].values()
