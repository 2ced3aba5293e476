"""Wait until CRIU, which outlives its phosd, has let processes go."""

import contextlib
import time
from collections.abc import Collection

from phosd.engine.criu.run.owned_processes import end_orphans, is_criu
from phosd.engine.recovery.account import Account
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS
from phosd.errors import Busy

_CRIU_SECONDS = 180.0
"""CRIU's action script gives up within seconds of phosd's end, but CRIU may call it only later."""
_LOOK_SECONDS = 0.05


def wait_for_dumps(processes: Collection[ProcessId], account: Account) -> None:
    """Wait until CRIU, which ends on its own after its phosd, has released the processes."""
    waiting = {pid for pid, _ in processes}
    end_orphans()
    end = time.monotonic() + _CRIU_SECONDS
    while waiting:
        dumped = roots_of_dumps()
        waiting = {pid for pid in waiting if dumped & _line_of(pid) or procfs.tracer(pid)}
        if waiting and time.monotonic() > end:
            break
        if waiting:
            time.sleep(_LOOK_SECONDS)
    for pid in waiting:
        account.failures[pid] = Busy(
            f"process {pid} is held by CRIU or a debugger",
            hint="end the debugger (`grep Tracer /proc/PID/status`), or bring back the file system "
            "that CRIU waits for; then `phos recover PID`",
        )


def roots_of_dumps() -> set[int]:
    """Return the roots of the trees that CRIU is dumping."""

    def look(pid: int) -> str:
        with contextlib.suppress(OSError):
            words = procfs.command_line(pid)
            if "dump" in words and "--tree" in words[:-1] and is_criu(pid):
                return words[words.index("--tree") + 1]
        return ""

    roots = (root for _, root in ABANDONABLE_THREADS.each(procfs.pids(), look))
    return {int(root) for root in roots if root.isascii() and root.isdecimal()}


def _line_of(pid: int) -> set[int]:
    """Return the process and its ancestors."""
    found: set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        stat = procfs.stat(pid)
        pid = stat.parent if stat else 0
    return found
