"""Relay a program's output and signals, and exit with its status."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from phosd.cli.program import Program

_POLL_MS = 30
_BLOCK = 1 << 16


def follow(program: Program) -> int:
    """Relay until the program has ended. Returns its exit code, or 128 plus the number of its
    signal.
    """
    streams = [_Stream(program.stdout, 1), _Stream(program.stderr, 2)]
    with _signals_passed_on(program):
        pidfd = os.pidfd_open(program.pid)
        try:
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            while not ended.poll(_POLL_MS):
                for stream in streams:
                    stream.pump()
        finally:
            os.close(pidfd)
        status = program.process.wait()
        for stream in streams:
            stream.pump()
            stream.close()
    return status if status >= 0 else 128 - status


class _Stream:
    """A file of the program's output, and the descriptor to which it is copied."""

    def __init__(self, source: Path, target: int) -> None:
        self._source = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        self._target = target
        self._wanted = True

    def pump(self) -> None:
        """Copy new output. Once the reader of our output is gone, drop it; the program goes on."""
        while block := os.read(self._source, _BLOCK):
            if not self._wanted:
                continue
            try:
                self._write(block)
            except OSError:  # a closed pipe or terminal
                self._wanted = False

    def _write(self, block: bytes) -> None:
        rest = memoryview(block)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:
                select.select([], [self._target], [])

    def close(self) -> None:
        os.close(self._source)


@contextmanager
def _signals_passed_on(program: Program) -> Iterator[None]:
    """Pass Ctrl-C on to the program's process group, as a terminal would, and SIGTERM to the
    program.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if program.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGINT)

    def terminate(number: int, _frame: FrameType | None) -> None:
        program.process.send_signal(number)

    before = {}
    for number, handler in ((signal.SIGINT, interrupt), (signal.SIGTERM, terminate)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
