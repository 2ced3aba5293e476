"""PyTorch's cache, emptied on request by real interpreters: nothing of it shows in the program."""

import time
from pathlib import Path

import pytest

from phosd.engine.hook_client.link import HookLink, Release, ReleaseState
from phosd.errors import Busy
from tests.native.hook.live import live
from tests.support.harness import wait_until

TORCH = """
import ctypes, os, signal, sys, threading, time, warnings
from types import ModuleType
emptied = []
def empty_cache():
    emptied.append(1)
torch, cuda = ModuleType("torch"), ModuleType("torch.cuda")
cuda.empty_cache = empty_cache
sys.modules.update({"torch": torch, "torch.cuda": cuda})
signal.signal(signal.SIGUSR1, lambda *_: None)
warnings.simplefilter("ignore")  # a fork beside threads
"""

WAIT = """
context = primary(0)
def beside():
    input()
    {beside}
    while not emptied:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.02)
worker = threading.Thread(target=beside)
worker.start()
while not emptied:
    ctypes.CDLL(None).pause()
worker.join()
say("emptied", len(emptied))
"""
"""The main thread waits in C until the test has told the other to go on."""

SPIN = """
context = primary(0)
def wait():
    say("waits")
    told = threading.Event()
    threading.Thread(target=lambda: (input(), told.set())).start()
    while not told.wait(0.01):
        pass
"""
"""The main thread runs Python again and again until the test tells the program to go on."""


PAUSE = ("34", "73")
"""Numbers of pause on x86-64, and of ppoll, which it is elsewhere."""


def waits_in_c(pid: int) -> None:
    """Wait until the main thread is in a system call (pause, or what it is made of) and stays."""

    def stays() -> bool:
        where = Path(f"/proc/{pid}/task/{pid}/syscall").read_text()
        time.sleep(0.1)
        return where.split()[0] in PAUSE and Path(f"/proc/{pid}/syscall").read_text() == where

    wait_until(stays, "the main thread to wait")


def ended(link: HookLink) -> ReleaseState:
    """What becomes of the call that is outstanding."""

    def state() -> ReleaseState | None:
        now = link.empty_cache(ask=False)
        return None if now.release is Release.ASKED else now

    return wait_until(state, "the call")


def test_the_call_is_made_once_for_all_who_ask(tmp_path: Path) -> None:
    with live(WAIT.format(beside="pass"), tmp_path, TORCH) as program:
        link = program.link
        waits_in_c(program.process.pid)
        assert link.empty_cache(ask=False).release is Release.NONE
        assert link.empty_cache(ask=True).release is Release.ASKED
        with HookLink(program.process.pid, tmp_path) as other:
            assert other.empty_cache(ask=True).release is Release.ASKED
        time.sleep(0.2)
        assert link.empty_cache(ask=False).release is Release.ASKED, "the main thread waits in C"
        program.tell()
        assert ended(link) == ReleaseState(Release.RELEASED, "")
        assert program.hears() == "emptied 1"


def test_a_forked_child_does_not_make_the_call_of_its_parent(tmp_path: Path) -> None:
    fork = """
    child = os.fork()
    if not child:
        for _ in range(1000):
            time.sleep(0.0001)
        os._exit(len(emptied))
    say("child", os.waitpid(child, 0)[1])
"""
    with live(WAIT.format(beside=fork.strip()), tmp_path, TORCH) as program:
        waits_in_c(program.process.pid)
        assert program.link.empty_cache(ask=True).release is Release.ASKED
        program.tell()
        assert program.hears() == "child 0"
        assert ended(program.link).release is Release.RELEASED
        assert program.hears() == "emptied 1"


def test_an_exception_of_the_call_is_not_the_programs(tmp_path: Path) -> None:
    code = """
def empty_cache():
    emptied.append(1)
    class Odd(Exception):
        def __repr__(self):
            raise ValueError("not even that")
    raise Odd if len(emptied) > 1 else OSError(5, "out of \\n order")
cuda.empty_cache = empty_cache
try:
    raise KeyError("of the program")
except KeyError as error:
    wait()
    say(sys.exc_info()[1] is error, len(emptied))
"""
    with live(SPIN + code, tmp_path, TORCH) as program:
        assert program.hears() == "waits"
        program.link.empty_cache(ask=True)
        failed = ended(program.link)
        assert failed.release is Release.FAILED
        assert failed.reason == ("torch.cuda.empty_cache() raised OSError(5, 'out of \\n order')")
        program.link.empty_cache(ask=True)
        assert ended(program.link).reason == "torch.cuda.empty_cache() raised an exception"
        program.tell()
        assert program.hears() == "True 2"


def test_an_interrupt_that_comes_meanwhile_is_the_programs(tmp_path: Path) -> None:
    code = """
cuda.empty_cache = lambda: signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    wait()
except KeyboardInterrupt:
    say("interrupted")
"""
    with live(SPIN + code, tmp_path, TORCH) as program:
        assert program.hears() == "waits"
        program.link.empty_cache(ask=True)
        assert program.hears() == "interrupted"
        assert ended(program.link) == ReleaseState(
            Release.FAILED, "a signal interrupted torch.cuda.empty_cache()"
        )
        program.tell()


@pytest.mark.parametrize(
    "damage",
    ["del cuda.empty_cache", "sys.modules['torch.cuda'] = None", "cuda.empty_cache = 7"],
)
def test_a_torch_that_is_half_there(damage: str, tmp_path: Path) -> None:
    with live(SPIN + damage + "\nwait()\nsay('unharmed')", tmp_path, TORCH) as program:
        assert program.hears() == "waits"
        program.link.empty_cache(ask=True)
        assert ended(program.link).release is Release.FAILED
        program.tell()
        assert program.hears() == "unharmed"


def test_an_interpreter_that_has_not_imported_torch(tmp_path: Path) -> None:
    with live(SPIN + "wait()", tmp_path, "import threading") as program:
        assert program.hears() == "waits"
        program.link.empty_cache(ask=True)
        assert ended(program.link).release is Release.NO_TORCH
        program.tell()


def test_nobody_is_asked_behind_a_closed_gate(tmp_path: Path) -> None:
    with live(SPIN + "wait()\nsay(len(emptied))", tmp_path, TORCH) as program:
        assert program.hears() == "waits"
        program.close_gate()
        for ask in (True, False):
            with pytest.raises(Busy, match="the process is closed, not running"):
                program.link.empty_cache(ask=ask)
        program.link.open_gate()
        program.tell()
        assert program.hears() == "0"
