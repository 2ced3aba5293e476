"""Bringing the processes of a group to a halt, all together, without deadlock (hazards of a gate).

Every gate closes at once; then the hooks are polled. While any process works, the others are told,
so that each lets through, one by one, what the working one may be waiting for.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec

from phosd.engine.hook_client.link import GateState, HookLink
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.rollback import Undo
from phosd.errors import Busy, NoSuchProcess

DEADLINE = 10.0
"""Seconds to wait for a program to become idle before it is left alone again."""
LONGEST_DEADLINE = 86_400.0
Deadline = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_DEADLINE)]
"""What may be said instead."""

_POLL = 0.0002


@contextmanager
def closed_gates(
    links: Sequence[HookLink], cancellation: Cancellation, deadline: float = DEADLINE
) -> Iterator[None]:
    """Inside, no process of the group submits work and all their devices are idle.

    Raises :class:`Busy` when that is not reached within ``deadline`` seconds; the gates are open
    again then. A process that dies inside is no error here: there is no gate left to open.
    """
    with Undo() as undo:
        close_gates(links, cancellation, deadline, undo)
        yield


def close_gates(
    links: Sequence[HookLink], cancellation: Cancellation, deadline: float, undo: Undo
) -> None:
    """What :func:`closed_gates` has inside, until ``undo`` opens the gates."""
    for link in links:
        undo.add(open_gate, link)
    give_up = time.monotonic() + deadline
    peers_busy = {link.pid: False for link in links}
    while True:
        states = {
            link.pid: link.close_gate(deadline, peers_busy=peers_busy[link.pid]) for link in links
        }
        if all(state.settled for state in states.values()):
            return
        cancellation.check()
        if time.monotonic() > give_up:
            raise Busy(
                f"the program did not come to rest within {deadline:.0f} s ({_why(states)})",
                hint="the program goes on; try again, or give a longer deadline",
            )
        # Not "unsettled": a hook that is told of busy peers does not settle, and two would wait
        # for each other.
        busy = {pid for pid, state in states.items() if state.busy}
        peers_busy = {pid: bool(busy - {pid}) for pid in states}
        time.sleep(_POLL)


def _why(states: dict[int, GateState]) -> str:
    reasons = []
    for pid, state in states.items():
        if state.capturing:
            reasons.append(f"process {pid} is capturing a stream")
        elif state.busy:
            reasons.append(f"process {pid} keeps its GPU busy, {state.waiting} threads held")
    return "; ".join(reasons) or "calls into the driver did not return"


def open_gate(link: HookLink) -> None:
    """Open the gate of a process. One that has ended, or lost its connection, has none closed."""
    if not link.connected:
        return  # the hook opened its gate when the connection broke
    try:
        link.open_gate()
    except NoSuchProcess:
        return  # the process ended, or the hook opened its gate when the connection broke
