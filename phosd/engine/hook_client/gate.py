"""Close the gates of a group's processes together, without deadlock.

All gates are closed at once; then the hooks are polled. While a process is busy, the others are
told, and let through the calls that the busy one may wait for: one by one at first, since each that
nobody waits for may make others wait in turn.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec

from phosd.engine.hook_client import long_work
from phosd.engine.hook_client.link import LONGEST_WAIT, GateState, HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.system import stopped_state
from phosd.errors import Busy, NoSuchProcess
from phosd.units import counted

DEADLINE = 10.0
"""Seconds to wait for a program to become idle; then its gates are opened again."""
LONGEST_DEADLINE = 86_400.0
Deadline = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_DEADLINE)]
"""A deadline in seconds, within the allowed bounds."""

_POLL = 0.0002
_WAIT_AMONG = 0.0001
"""Seconds that a hook may wait for rest before it answers, while other hooks are to be asked."""
_ROUNDS = 8
_MOST_ADMITTED = 16
"""How many calls are let through at once, at most, and after how many rounds with the same busy
processes another one more: a rank may be hundreds of launches behind its peers.
"""
_GRACE = 1.0
"""Seconds after the deadline at which a hook opens its gate by itself: phosd, if it lives, does so
before, and can say which process it was.
"""
_SEAL_SECONDS = 0.3
"""How long the whole program may stand still for a call that does not return, before it goes on for
as long and the gates close anew. Compiling a kernel is such a call.
"""


@contextmanager
def closed_gates(
    links: Sequence[HookLink], progress: Progress, deadline: float = DEADLINE
) -> Iterator[bool]:
    """Keep all gates sealed inside: all devices are idle, and no thread is in the driver. Yields
    whether kernels of the program take more than a second, again and again.

    Raises :class:`Busy` if that is not reached within ``deadline`` seconds; the gates are then open
    again. Raises :class:`Internal` if the operation's record does not name a process. A process
    that dies inside causes no error here, as it has no gate to open.
    """
    with Undo() as undo:
        yield close_gates(links, progress, deadline, undo)


def close_gates(links: Sequence[HookLink], progress: Progress, deadline: float, undo: Undo) -> bool:
    """Close the gates as :func:`closed_gates` does, until ``undo`` opens them."""
    progress.require_named(link.pid for link in links)
    for link in links:
        undo.add(open_gate, link)
    give_up = time.monotonic() + deadline
    long_kernels = False
    if not _settle(links, progress, deadline, give_up, long_work.LONG):
        if _has_long_work(links):
            long_kernels = _await_long_work(links, progress, deadline)
            give_up = time.monotonic() + deadline
        _settle(links, progress, deadline, give_up)
    while inside := _seal(links, progress):
        if time.monotonic() > give_up:
            raise Busy(
                f"process {inside[0]} is in a call into the driver that does not return",
                hint="the program goes on; try again, or give a longer deadline",
            )
        for link in links:
            link.open_gate()
        time.sleep(_SEAL_SECONDS)
        _settle(links, progress, deadline, give_up)
    return long_kernels


def _has_long_work(links: Sequence[HookLink]) -> bool:
    """Return whether gates wait for long work, rather than for much and short work, or for a call
    that does not return.
    """
    return max(long_work.unfinished(links).values(), default=0.0) >= long_work.LONG / 2


def _await_long_work(links: Sequence[HookLink], progress: Progress, deadline: float) -> bool:
    """Open the gates again until long work is about to end. Returns whether it is long
    kernels again and again.
    """

    def open_all() -> None:
        for link in links:
            link.open_gate()

    def close_all() -> None:
        for link in links:
            link.close_gate(deadline + _GRACE)

    return long_work.await_end(links, progress, deadline, close_all, open_all)


def _settle(
    links: Sequence[HookLink],
    progress: Progress,
    deadline: float,
    give_up: float,
    patience: float = math.inf,
) -> bool:
    """Close all gates, and wait until no process submits work and all devices are idle; False if
    they are not after ``patience`` seconds.
    """
    until = time.monotonic() + patience
    wait = LONGEST_WAIT if len(links) == 1 else _WAIT_AMONG
    for_peers = dict.fromkeys((link.pid for link in links), 0)
    busy: set[int] = set()
    rounds = 0
    while True:
        progress.check()  # also before the first look: most gates are closed by that
        states = {
            link.pid: link.close_gate(deadline + _GRACE, wait=wait, for_peers=for_peers[link.pid])
            for link in links
        }
        if all(state.settled for state in states.values()):
            return True
        if time.monotonic() > give_up:
            raise Busy(
                f"the program did not come to rest within {deadline:g} s ({_why(states)})",
                hint="the program goes on; try again, or give a longer deadline",
            )
        if time.monotonic() > until:
            return False
        # Not "unsettled": a hook that is told of busy peers does not settle, and two would wait for
        # each other.
        before, busy = busy, {pid for pid, state in states.items() if state.busy}
        rounds = rounds + 1 if busy == before else 0
        admitted = min(1 + rounds // _ROUNDS, _MOST_ADMITTED)
        for_peers = {pid: admitted if busy - {pid} else 0 for pid in states}
        time.sleep(_POLL)


def _seal(links: Sequence[HookLink], progress: Progress) -> list[int]:
    """Hold all other calls into the driver, too, and wait until no thread is in one, for a while.

    Returns the processes in which one still is. Only when all are settled: what one process asks
    its driver for may be what another's device waits for.
    """
    end = time.monotonic() + _SEAL_SECONDS
    while inside := [link.pid for link in links if link.seal_gate()]:
        if time.monotonic() > end:
            break
        progress.check()
        time.sleep(_POLL)
    return inside


def _why(states: dict[int, GateState]) -> str:
    reasons = []
    for pid, state in states.items():
        if state.capturing:
            reasons.append(f"process {pid} is capturing a stream")
        elif state.busy:
            reasons.append(
                f"process {pid} keeps its GPU busy, {counted(state.waiting, 'thread')} held"
            )
    return "; ".join(reasons) or "calls into the driver did not return"


def open_gate(link: HookLink) -> None:
    """Open the gate of a process, unless the process has ended or the connection is lost."""
    if not link.connected:
        return  # the hook opened its gate when the connection broke
    if stopped_state.stands_still(
        link.pid
    ):  # it answers nobody, and opens its gate when it goes on
        link.close()
        return
    try:
        link.open_gate()
    except NoSuchProcess:
        return  # the process ended, or the hook opened its gate when the connection broke
