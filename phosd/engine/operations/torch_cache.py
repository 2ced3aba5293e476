"""Device memory that PyTorch's caching allocator keeps and no tensor uses, released on request.

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

PATIENCE = 2.0
"""Seconds that the processes of a group have, all at once. Only a program's main thread can do it,
between two bytecodes of Python; one that waits in a call may come to it late or never.
"""

_POLL = 0.002

_WHY_NOT = {
    Release.ASKED: f"its main thread did not come to it within {PATIENCE:.0f} s",
    Release.NO_INTERPRETER: "it ran no Python when it began to use CUDA",
    Release.NO_TORCH: "it has not imported torch",
    Release.CAPTURING: "it was capturing a stream",
}


def release_cached(group: CheckpointGroup, progress: Progress) -> None:
    """Ask every process of the group, while it runs, and note what that has brought or why nothing.

    ``released_bytes`` of the details are of device memory. Whatever comes of it, the checkpoint may
    go on.
    """
    before = _device_bytes(group)
    until = time.monotonic() + PATIENCE
    with ThreadPoolExecutor(len(group.members), "release") as pool:
        answers = list(pool.map(lambda member: _why_not(member, group, until), group.members))
    failed = defaultdict(list)
    for member, why in zip(group.members, answers, strict=True):
        if why:
            failed[why].append(str(member.pid))
    for why, pids in failed.items():
        progress.note(f"cached memory of process {', '.join(pids)} was not released: {why}")
    if not all(answers):
        # What the program allocates meanwhile counts against it.
        released = max(0, before - _device_bytes(group))
        progress.figures.released_bytes = released
        progress.note(f"PyTorch released {released / 1e9:.2f} GB of cached device memory")
    progress.check()


def _why_not(member: Member, group: CheckpointGroup, until: float) -> str:
    """Have one process do it; why it did not, or an empty text.

    The connection is of its own: a hook that is older than this request ends it.
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
        if state is None or not isinstance(error, Timeout):  # else the time is over, as it should
            return error.what
    return _reason(state)


def _reason(state: ReleaseState) -> str:
    if state.release is Release.RELEASED:
        return ""
    return _WHY_NOT.get(state.release) or state.reason or "its hook does not say why"


def _device_bytes(group: CheckpointGroup) -> int:
    return sum(block.size for link in group.links for block in link.list_blocks())
