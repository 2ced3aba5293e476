"""What the keeper of a pid namespace arranges there."""

import subprocess
import sys
from pathlib import Path

PROC = """
import ctypes, os, sys
from phosd.engine.program.keeper import mount_proc
libc = ctypes.CDLL(None)
def bind(source, target):
    assert libc.mount(source.encode(), target.encode(), None, 4096, None) == 0
bind(sys.argv[1] + "/figures", "/proc/meminfo")
bind("/proc/sys", "/proc/sys")
assert libc.mount(None, b"/proc/sys", None, 32 | 4096 | 1, None) == 0  # remounted, read-only
ids = mount_proc(sys.argv[1] + "/aside")
assert os.readlink("/proc/self") == "1"
assert open("/proc/meminfo").read() == "the container's"
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
    (tmp_path / "aside").mkdir()
    unshared = ("unshare", "--mount", "--pid", "--fork")  # private: nobody else sees the mounts
    done = subprocess.run([*unshared, sys.executable, "-c", PROC, str(tmp_path)], check=False)
    assert done.returncode == 0
