"""A child, forked before CUDA starts, uses the GPU itself as soon as the file of the first argument
is there, which it then removes. If the file has a word in it, it ends when the file is there again.
"""

import os
import sys
import time
from pathlib import Path

from cuda.bindings import driver
from gpu import Device, Report, State, ok


def late(told: Path) -> None:
    """The child's life."""
    ok(driver.cuDriverGetVersion())  # the library is loaded, and not initialised
    while not told.exists():
        time.sleep(0.002)
    ok(driver.cuInit(0))
    ends = bool(told.read_text())
    told.unlink()
    while not ends or not told.exists():
        time.sleep(0.002)


def main() -> None:
    if os.fork() == 0:
        late(Path(sys.argv[2]))
        os._exit(0)
    report = Report()
    state = State(Device())
    for step in report.steps():
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
