"""Wait only for a moment for a process that is stopped, by a signal or a debugger, or frozen.

Nobody in it answers, neither its hook nor the driver, until its user lets it go on. Meanwhile all
that belong to it stand still, too.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from phosd.engine.system import cgroups, procfs
from phosd.engine.system.freezer import frozen_for
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy

TIMEOUT = 3.0
"""Seconds that a process may stand still in one job: debuggers and profilers stop it for less."""
LOOK_SECONDS = 0.1
"""Seconds without an answer after which it is looked at again."""
_PAUSE = 0.01
_FORGET_SECONDS = 30.0
"""Seconds after which a process that was last seen standing still is thought to have gone on."""
_T = TypeVar("_T")


@dataclass
class _Seen:
    first: float
    last: float


_lock = threading.Lock()
_still: dict[ProcessId, _Seen] = {}
"""Processes that stood still when they were last looked at: each is waited for once, not by every
step that needs it.
"""
_left_behind: dict[int, threading.Thread] = {}
"""By pid, threads that wait until a process goes on and answers them."""


def require_going(pid: int) -> bool:
    """Return whether the process is going. Raises :class:`Busy` if it has stood still for
    :data:`TIMEOUT` seconds.
    """
    process = procfs.process_id(pid)
    if process is None:
        return True  # there is nobody to wait for
    if (why := _why_still(pid)) is None:
        with _lock:
            _still.pop(process, None)
        return True
    now = time.monotonic()
    with _lock:
        for each in [each for each, seen in _still.items() if seen.last < now - _FORGET_SECONDS]:
            del _still[each]
        seen = _still.setdefault(process, _Seen(now, now))
        seen.last = now
    if now - seen.first >= TIMEOUT:
        state, way_out = why
        raise Busy(
            f"process {pid} {state}",
            hint=f"{way_out}, then try again; if it still stands still, `phos recover {pid}`",
        )
    return False


def is_still(pid: int) -> bool:
    """Return whether a process stands still now."""
    return _why_still(pid) is not None


def _why_still(pid: int) -> tuple[str, str] | None:
    """Return how a process stands still, and what lets it go on; None if it is going."""
    if stands_still(pid):
        way_out = f"let it go on (`kill -CONT {pid}`, or detach the debugger)"
        return "is stopped, by a signal or a debugger", way_out
    if frozen_for(pid):
        return "is frozen by phosd, as part of a hollow program", f"`phos resume {pid}`"
    for _, path in cgroups.freezers(pid):
        return (
            f"is frozen, with its cgroup {path}",
            "thaw it (`docker unpause`, `systemctl thaw`)",
        )
    return None


def await_going(pid: int) -> None:
    """Wait until the process is going. Raises :class:`Busy` as :func:`require_going` does."""
    while not require_going(pid):
        time.sleep(_PAUSE)


def answer(pid: int, ask: Callable[[], _T], *, changes: bool = True) -> _T:
    """Return what ``ask`` returns, or raise what it raises; the process must answer it.

    Raises :class:`Busy` if the process stands still. If that begins in the middle, ``ask`` goes on
    in a thread that is left behind, and is answered when the process goes on; ``changes``: it does
    something then (:func:`is_asked`).
    """
    if stands_still(pid):  # who is frozen is noticed when no answer comes
        await_going(pid)
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    thread = threading.Thread(target=run, name=f"ask-{pid}", daemon=True)
    thread.start()
    while True:
        try:
            found, error = answers.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            try:
                require_going(pid)
            except Busy:
                if changes:
                    _leave_behind(pid, thread)
                raise
            continue
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]


def is_asked(pid: int) -> bool:
    """Return whether :func:`answer` has left a thread behind whose question the process will still
    answer by a change.
    """
    with _lock:
        return pid in _left_behind and _left_behind[pid].is_alive()


def _leave_behind(pid: int, thread: threading.Thread) -> None:
    with _lock:
        for each in [each for each, left in _left_behind.items() if not left.is_alive()]:
            del _left_behind[each]
        _left_behind[pid] = thread


def stands_still(pid: int) -> bool:
    """Return whether each thread of the process is stopped, by a signal or a tracer, or has ended:
    none of them answers.
    """
    found = procfs.stat(pid)
    if found is None or not (found.stopped or found.dead):
        return False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        others = (procfs.stat(thread) for thread in procfs.threads(pid))
        return all(other is None or other.stopped or other.dead for other in others)
    return True
