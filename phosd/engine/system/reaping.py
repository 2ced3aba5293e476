"""Wait for processes that may not end soon, though they were killed."""

import contextlib
import subprocess
import threading
from typing import Any


def reap_later(process: "subprocess.Popen[Any]") -> None:
    """Wait for a process in the background, however long it takes; close its pipes after its end.

    A process that waits for a file system that does not answer ends when that answers again.
    """
    threading.Thread(target=_reap, args=(process,), name="reaper", daemon=True).start()


def _reap(process: "subprocess.Popen[Any]") -> None:
    process.wait()
    with contextlib.suppress(BrokenPipeError), process:  # it did not read all that it was sent
        pass
