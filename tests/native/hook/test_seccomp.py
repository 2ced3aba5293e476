"""A kernel that refuses membarrier(2): the gate cannot be closed, so it stays open."""

from pathlib import Path

import pytest

from phosd.engine.hook_client.link import HookState
from phosd.errors import Unsupported
from tests.native.hook.live import live

FORBID = """
import ctypes

class Step(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8),
                ("value", ctypes.c_uint32)]

class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(Step))]

def forbid_membarrier(command=None):
    # From linux/filter.h, linux/seccomp.h: load, jump if equal, return; number 0, arguments at 16.
    load, equal, answer = 0x20, 0x15, 0x06
    allow, eperm = 0x7FFF0000, 0x00050000 | 1
    steps = [(load, 0, 0, 0), (equal, 0, 3, 324)]
    steps += [(load, 0, 0, 16), (equal, 0, 1, command)] if command else [(equal, 0, 1, 324)] * 2
    steps += [(answer, 0, 0, eperm), (answer, 0, 0, allow)]
    program = Filter(len(steps), (Step * len(steps))(*(Step(*step) for step in steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    # For every thread: SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC.
    assert libc.syscall(317, 1, 1, ctypes.byref(program)) == 0, ctypes.get_errno()
    refused = [n for n in (0, 8, 16) if libc.syscall(324, n, 0, 0) == -1]
    # The barrier (8) is also refused to who has not registered (16).
    assert refused == {None: [0, 8, 16], 16: [8, 16], 8: [8]}[command], refused
"""

WORK = """
primary(0)
memory = ok(driver.cuMemAlloc(4096))
def work():
    ok(driver.cuMemsetD8(memory, 1, 4096))
    say("worked")
work()
sys.stdin.readline()
work()
"""


def test_the_hook_says_so_at_once(tmp_path: Path) -> None:
    with live(WORK, tmp_path, first=FORBID + "forbid_membarrier()\n") as program:
        assert program.hears() == "worked"
        hello = program.link.hello()
        assert not hello.parkable and not hello.uses_unsupported
        assert "membarrier" in hello.reason
        with pytest.raises(Unsupported, match="membarrier"):
            program.link.close_gate(10)
        program.tell()
        assert program.hears() == "worked"


@pytest.mark.parametrize("command", [16, 8], ids=["registering", "the barrier itself"])
def test_a_program_that_forbids_it_later_is_not_held(tmp_path: Path, command: int) -> None:
    """Also when the gate was closing already as the refusal came."""
    later = f"{FORBID}forbid_membarrier({command})\nsay('forbidden')\nsys.stdin.readline()\n"
    with live(later + WORK, tmp_path) as program:
        assert program.hears() == "forbidden"
        assert program.link.hello().parkable
        with pytest.raises(Unsupported, match="membarrier"):
            program.link.close_gate(60)
        assert program.link.hello().state is HookState.RUNNING
        program.tell()
        assert program.hears() == "worked"
        program.tell()
        assert program.hears() == "worked"
