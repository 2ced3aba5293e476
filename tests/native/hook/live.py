"""Programs that wait for a line of input, and parking them through their hook."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from phosd.engine.hook_client.link import HookLink
from phosd.errors import NoSuchProcess
from tests.support.harness import PATIENCE, environment, running, users_hooks, wait_until

PRELUDE = '''
import sys
from cuda.bindings import driver

def ok(result):
    """The values of a driver call, which must have succeeded."""
    status, *values = result
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if len(values) == 1 else values

def say(*what):
    print(*what, flush=True)

def primary(device):
    context = ok(driver.cuDevicePrimaryCtxRetain(device))
    ok(driver.cuCtxSetCurrent(context))
    return context

ok(driver.cuInit(0))
'''


class Live:
    """A running program: lines to and from it, and the link to its hook."""

    def __init__(self, process: subprocess.Popen[str], link: HookLink) -> None:
        self.process = process
        self.link = link

    def hears(self) -> str:
        """The program's next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self) -> None:
        """Let the program go on to its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close_gate(self) -> None:
        """Hold the program's submissions; returns when nothing runs any more."""
        wait_until(lambda: self.link.close_gate(PATIENCE).settled, "the gate to close")

    @contextmanager
    def parked(self) -> Iterator[Self]:
        """All blocks are gone inside; they are back and the gate is open after."""
        memory = []
        try:
            for block, descriptor in self.link.export_blocks():
                assert descriptor is not None, block
                memory.append((block.id, descriptor))
            self.close_gate()
            assert self.link.park() == len(memory)
            yield self
            assert self.link.unpark(memory) == len(memory)
            self.link.open_gate()
        finally:
            for _, descriptor in memory:
                os.close(descriptor)


def linked(pid: int, runtime: Path) -> HookLink:
    """A connection to the hook of a program that has called ``cuInit``, or is about to."""
    link = HookLink(pid, runtime)

    def connected() -> bool:
        try:
            link.connect()
        except NoSuchProcess:  # no socket yet, or nobody listens yet
            return False
        return True

    wait_until(connected, "the hook to listen")
    return link


@contextmanager
def live(code: str, runtime: Path, first: str = "", **extra: str) -> Iterator[Live]:
    """Run ``first``, :data:`PRELUDE` and ``code`` under the hook; all must end well and say nothing
    on stderr. The program is ready for a link as soon as ``cuInit`` has returned.
    """
    users_hooks(runtime)
    with running(
        # Python 3.12 and newer warn of a fork beside the threads of the hook.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", first + PRELUDE + code],
        env=environment(hooked=True, runtime=runtime, extra=extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        with linked(process.pid, runtime) as link:
            yield Live(process, link)
        left, errors = process.communicate("", timeout=PATIENCE)
        assert (process.returncode, left, errors) == (0, "", "")
