"""More blocks than a process may have descriptors."""

from pathlib import Path

from tests.native.hook.live import live

BLOCKS = 1170
LIMIT = 1024 + BLOCKS
"""The usual limit, and what the software GPU itself has open: a file for each block. Real driver
handles are no descriptors."""

MANY = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
primary(0)
memory = [ok(driver.cuMemAlloc(2 << 20)) for _ in range({BLOCKS})]
for number, at in enumerate(memory):
    ok(driver.cuMemsetD32(at, number, 1))

def open_files():
    return len(os.listdir("/proc/self/fd"))

before = open_files()
for _ in range(2):
    say("ready")
    sys.stdin.readline()
    with open(os.devnull):
        say(open_files() - 1 - before)
value = bytearray(4)
same = 0
for number, at in enumerate(memory):
    ok(driver.cuMemcpyDtoH(value, at, 4))
    same += int.from_bytes(value, "little") == number
say(same)
"""


def test_their_descriptors_are_not_the_programs(tmp_path: Path) -> None:
    """Parked or back, the program can open as many files as before."""
    folder = {"PHOS_SOFTGPU_DIR": str(tmp_path / "gpu"), "PHOS_SOFTGPU_MEMORY": "4G"}
    with live(MANY, tmp_path, **folder) as program:
        assert program.hears() == "ready"
        assert len(program.link.list_blocks()) == BLOCKS
        with program.parked():
            program.tell()
            parked = int(program.hears())
            assert program.hears() == "ready"
        program.tell()
        assert parked <= 1 - BLOCKS  # one more is the link's connection
        assert int(program.hears()) <= 1
        assert program.hears() == str(BLOCKS)
