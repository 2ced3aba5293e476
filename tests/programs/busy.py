"""Processor work that never rests beside the GPU's: a thread that counts, and a child that forks.

Both count in shared memory, the file ``counts`` in the working folder: two numbers of 8 bytes.
"""

import mmap
import os
import threading
import time

from gpu import Device, Report, State


class Counts:
    """The numbers in the file."""

    def __init__(self) -> None:
        with open("counts", "w+b") as file:  # noqa: PTH123
            file.truncate(16)
            self._memory = mmap.mmap(file.fileno(), 16)

    def count(self, which: int) -> None:
        place = slice(8 * which, 8 * which + 8)
        number = int.from_bytes(self._memory[place], "little")
        self._memory[place] = (number + 1).to_bytes(8, "little")


def fork_on(counts: Counts, parent: int) -> None:
    """Fork children that end at once, as long as the parent lives."""
    while os.getppid() == parent:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        counts.count(1)
        time.sleep(0.001)


def count_on(counts: Counts) -> None:
    while True:
        counts.count(0)
        time.sleep(0.001)


def main() -> None:
    counts, own = Counts(), os.getpid()
    if os.fork() == 0:
        fork_on(counts, own)
        os._exit(0)
    threading.Thread(target=count_on, args=(counts,), daemon=True).start()
    report = Report()
    state = State(Device())
    for step in report.steps():
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
