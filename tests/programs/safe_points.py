"""Has its say in its checkpoints, in the way that the second argument names.

Besides its steps it prints lines that begin with "#": what its callables and its calls did.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok

from phosd import program

EVERY = 50
"""Steps between two checkpoints of a program that saves itself."""
Step = Callable[[int], object]


def say(*words: object) -> None:
    os.write(1, ("# " + " ".join(map(str, words)) + "\n").encode())


def registered() -> None:
    program.before_checkpoint(lambda: say("before"))
    program.after_checkpoint(lambda: say("after"))
    program.after_restore(lambda: say("came back"))


def saves() -> Step:
    """Saves itself every fifty steps."""
    registered()

    def step(number: int) -> None:
        if number % EVERY == EVERY - 1:
            say(number, program.checkpoint())

    return step


def ends() -> Step:
    """Saves itself once and comes to its end by that."""

    def step(number: int) -> None:
        if number == 5:
            say(number, program.checkpoint(then="end", name="last"))

    return step


def holds() -> Step:
    """Saves itself once, and stands still then."""

    def step(number: int) -> None:
        if number == 5:
            say(number, program.checkpoint(then="hold"))

    return step


def passes() -> Step:
    """Comes to a safe point after each step."""
    registered()

    def step(number: int) -> None:
        if (passed := program.safe_point()) is not None:
            say(number, passed)

    return step


def seldom() -> Step:
    """Has a safe point, and comes to the next one only when the file ``come`` is there."""

    def step(number: int) -> None:
        if (number == 0 or Path("come").exists()) and (passed := program.safe_point()):
            say(number, passed)

    return step


def _callable(call: Callable[[], object]) -> Step:
    """Calls that before each checkpoint."""
    program.before_checkpoint(call)
    return passes()


def raises() -> Step:
    def broken() -> None:
        if not Path("mended").exists():
            raise OSError(28, "no room for the last words")

    return _callable(broken)


def hangs() -> Step:
    def hang() -> None:
        say("hangs")
        while not Path("come").exists():
            time.sleep(0.02)

    return _callable(hang)


def forks() -> Step:
    def fork() -> None:
        child = os.fork()
        if child == 0:
            say("child", program.checkpoint(), program.safe_point())
            os._exit(0)
        os.waitpid(child, 0)

    return _callable(fork)


def computes() -> Step:
    memory = allocate(4096)

    def compute() -> None:
        ok(driver.cuMemsetD8(memory, 1, 4096))
        ok(driver.cuCtxSynchronize())

    return _callable(compute)


def asks_again() -> Step:
    def ask() -> None:
        try:
            program.checkpoint()
        except RuntimeError as error:
            say(error)
        say("nested", program.safe_point())

    return _callable(ask)


def threads() -> Step:
    """Ten threads ask for a checkpoint at once."""
    calls: list[int] = []
    program.before_checkpoint(lambda: calls.append(threading.get_ident()))
    together = threading.Barrier(10)

    def ask() -> None:
        together.wait()
        say("thread", program.checkpoint())

    def step(number: int) -> None:
        if number == 5:
            all_of_them = [threading.Thread(target=ask) for _ in range(10)]
            for thread in all_of_them:
                thread.start()
            for thread in all_of_them:
                thread.join()
            say("calls", len(calls))

    return step


def captures() -> Step:
    """Asks for a checkpoint while it captures a stream."""

    def step(number: int) -> None:
        if number != 5:
            return
        stream = ok(driver.cuStreamCreate(1))
        ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(2)))
        try:
            program.checkpoint()
        except program.CheckpointFailed as error:
            say(error.name, error)
        say("passed", program.safe_point())
        ok(driver.cuGraphDestroy(ok(driver.cuStreamEndCapture(stream))))

    return step


def asks() -> Step:
    """Asks for a checkpoint whenever the file ``ask`` is there, and removes it."""

    def step(number: int) -> None:
        if not Path("ask").exists():
            return
        Path("ask").unlink()
        say("asks")
        began = ctypes.get_errno()
        try:
            say(number, program.checkpoint())
        except program.CheckpointFailed as error:
            say(error.name, error)
        except KeyboardInterrupt:
            say("interrupted")
        assert ctypes.get_errno() == began

    return step


WAYS = {
    way.__name__: way
    for way in (
        *(saves, ends, holds, passes, seldom, raises, hangs, forks),
        *(computes, asks_again, threads, captures, asks),
    )
}


def main() -> None:
    report = Report()
    say("absent", program.checkpoint())
    device = Device()
    state = State(device)
    step = WAYS[sys.argv[2]]()
    for number in report.steps():
        report.tell(number, state.step(number, report.seed))
        step(number)


if __name__ == "__main__":
    main()
