"""As single.py; a word after the number of steps names a library, whose function ``profile`` is
called once there is a file of that name.
"""

import ctypes
import sys
from pathlib import Path

from gpu import Device, Report, State

WISH = Path("profile")


def main() -> None:
    report = Report()
    library = ctypes.CDLL(sys.argv[2]) if len(sys.argv) > 2 else None
    state = State(Device())
    for step in report.steps():
        if library is not None and WISH.exists():
            library.profile()
            WISH.unlink()
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
