"""Ask PyTorch to release the device memory that its caching allocator holds and no tensor uses.

The hook has the program's own interpreter call ``torch.cuda.empty_cache()``. What is released is
neither parked nor saved.
"""

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from phosd.engine.hook_client.link import HookLink, Release, ReleaseState
from phosd.engine.job.progress import Progress
from phosd.engine.program.group import CheckpointGroup, Member
from phosd.errors import PhosError, Timeout
from phosd.units import human_bytes

TIMEOUT = 2.0
"""Seconds that all processes of a group have together. Only the main thread of a program can run
the call, between two bytecodes; a thread that waits in a call may get to it late or never.
"""

_POLL = 0.002

_WHY_NOT = {
    Release.ASKED: f"its main thread did not come to it within {TIMEOUT:.0f} s",
    Release.NO_INTERPRETER: "it ran no Python when it began to use CUDA",
    Release.NO_TORCH: "it has not imported torch",
    Release.CAPTURING: "it was capturing a stream",
}


def release_cached(group: CheckpointGroup, progress: Progress) -> None:
    """Ask every process of the group, while it runs; note the result, or why there was none.

    Sets the figure ``released_bytes``. The checkpoint may go on whatever the result is.
    """
    before = _device_bytes(group)
    until = time.monotonic() + TIMEOUT
    with ThreadPoolExecutor(max(1, len(group.users)), "release") as pool:
        answers = list(pool.map(lambda member: _why_not(member, group, until), group.users))
    failed = defaultdict(list)
    for member, why in zip(group.users, answers, strict=True):
        if why:
            failed[why].append(str(member.pid))
    for why, pids in failed.items():
        progress.note(f"cached memory of process {', '.join(pids)} was not released: {why}")
    if not all(answers):
        # Memory that the program allocates meanwhile reduces this figure.
        released = max(0, before - _device_bytes(group))
        progress.figures.released_bytes = released
        progress.note(f"PyTorch released {human_bytes(released)} of cached device memory")
    progress.check()


def _why_not(member: Member, group: CheckpointGroup, until: float) -> str:
    """Ask one process to release its cache; return why it did not, or an empty text.

    Uses a connection of its own, because a hook too old for this request closes the connection.
    """
    if member.link is None:
        return "it runs without the hook"
    state = None
    try:
        with HookLink(member.pid, group.runtime_dir, max(0.0, until - time.monotonic())) as link:
            state = link.empty_cache(ask=True, until=until)
            while state.release is Release.ASKED and time.monotonic() < until - _POLL:
                time.sleep(_POLL)
                state = link.empty_cache(ask=False, until=until)
    except PhosError as error:
        if state is None or not isinstance(error, Timeout):  # otherwise the time is up, as expected
            return error.what
    return _reason(state)


def _reason(state: ReleaseState) -> str:
    if state.release is Release.RELEASED:
        return ""
    return _WHY_NOT.get(state.release) or state.reason or "its hook does not say why"


def _device_bytes(group: CheckpointGroup) -> int:
    return sum(block.size for link in group.links for block in link.list_blocks())
