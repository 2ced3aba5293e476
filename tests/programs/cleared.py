"""Like single.py, with a large cache that was cleared and is not used yet, as a server has one for
its keys and values. A piece of it is read each step; at SIGUSR1 all of it is written.
"""

import os
import signal

from gpu import Device, Report, State, allocate, read, write

CHUNK = 2 << 20
CHUNKS = 64


class Cache:
    """Device memory of ``CHUNKS`` times 2 MiB."""

    def __init__(self) -> None:
        self.address = allocate(CHUNKS * CHUNK)
        self.wanted = False
        signal.signal(signal.SIGUSR1, self._want)

    def fill_if_wanted(self) -> None:
        """Write what is different in each chunk, and say so."""
        if self.wanted:
            self.wanted = False
            for number in range(CHUNKS):
                write(self.address + number * CHUNK, os.urandom(16) * (CHUNK // 16))
            os.write(1, b"filled\n")

    def piece(self, step: int) -> bytes:
        """What is somewhere in a chunk, another one each step."""
        return read(self.address + step % CHUNKS * CHUNK + 4096 * (step % 512), 64)

    def _want(self, *_: object) -> None:
        self.wanted = True


def main() -> None:
    report = Report()
    state = State(Device())
    cache = Cache()
    for step in report.steps():
        cache.fill_if_wanted()
        report.tell(step, state.step(step, report.seed) + cache.piece(step))


if __name__ == "__main__":
    main()
