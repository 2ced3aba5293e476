"""What a context carries with it: its stacks, its memory, and who else may reach that."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.hook.live import PRELUDE, live
from tests.support.harness import PATIENCE, environment

STACK = """
primary(0)
limit = driver.CUlimit.CU_LIMIT_STACK_SIZE
ok(driver.cuCtxSetLimit(limit, 4096))
memory = ok(driver.cuMemAlloc(3 << 20))
for _ in range(3):
    say(ok(driver.cuCtxGetLimit(limit)))
    sys.stdin.readline()
"""


def test_stacks_are_given_up_while_parked(tmp_path: Path) -> None:
    """The driver's own memory for stacks is large, and would be copied with the rest."""
    with live(STACK, tmp_path) as program:
        assert program.hears() == "4096"
        with program.parked():
            program.tell()
            assert program.hears() == "0"
        program.tell()
        assert program.hears() == "4096"
        program.tell()


FREED = """
def free():
    return ok(driver.cuMemGetInfo())[0]

watcher = primary(0)
context = watcher if RESET else ok(driver.cuCtxCreate(None, 0, 0))
ok(driver.cuCtxSetCurrent(context))
before = free()
for size in (100, 100 << 10, 5 << 20, 7 << 20):
    ok(driver.cuMemAlloc(size))
say(before - free() >= 12 << 20)
sys.stdin.readline()
if RESET:
    ok(driver.cuDevicePrimaryCtxReset(0))
    primary(0)
else:
    ok(driver.cuCtxDestroy(context))
    ok(driver.cuCtxSetCurrent(watcher))
say(before - free())
sys.stdin.readline()
"""


@pytest.mark.parametrize("reset", [False, True], ids=["destroyed", "reset"])
def test_a_contexts_memory_ends_with_it(tmp_path: Path, reset: bool) -> None:
    with live(f"RESET = {reset}\n{FREED}", tmp_path) as program:
        assert program.hears() == "True"
        assert sum(block.size for block in program.link.list_blocks()) >= 12 << 20
        program.tell()
        left = int(program.hears())
        blocks = program.link.list_blocks()
        program.tell()
    assert (left, blocks) == (0, [])


PEER = r'''
STORE = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry store(.param .u64 where) {
    .reg .u64 %at;
    ld.param.u64 %at, [where];
    st.global.u32 [%at], 77;
    ret;
}
\0"""

import ctypes

owner, accessor = primary(1), primary(0)
kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(STORE)), b"store"))

def allocate():
    ok(driver.cuCtxSetCurrent(owner))
    memory = [ok(driver.cuMemAlloc(size)) for size in (1000, 3 << 20)]
    ok(driver.cuCtxSetCurrent(accessor))
    return memory

memory = allocate()
for step in sys.argv[1:]:
    if step == "open":
        ok(driver.cuCtxEnablePeerAccess(owner, 0))
    elif step == "close":
        ok(driver.cuCtxDisablePeerAccess(owner))
    elif step == "more":
        memory = allocate()
at = memory[int(sys.argv[-1])]
ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(at),), (ctypes.c_uint64,)), 0))
say(int(driver.cuCtxSynchronize()[0]))
ok(driver.cuCtxSetCurrent(owner))
value = bytearray(4)
ok(driver.cuMemcpyDtoH(value, at, 4))
say(value[0] == 77)
'''


@pytest.mark.parametrize("which", ["0", "1"], ids=["small", "large"])
@pytest.mark.parametrize(
    "steps",
    ["", "open", "open more", "open close", "open more close", "open close more"],
)
def test_peer_access_is_open_as_long_as_the_program_says(
    tmp_path: Path, steps: str, which: str
) -> None:
    """A kernel of one device stores to memory of another, allocated before or after."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + PEER, *steps.split(), which],
        env=environment(hooked=True, runtime=tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    allowed = steps.startswith("open") and "close" not in steps
    assert done.stdout == ("0\nTrue\n" if allowed else "700\nFalse\n"), done.stderr
    assert (done.returncode, done.stderr) == (0, "")
