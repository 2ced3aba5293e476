"""Copying while the program runs, in passes: each copies what is not there as it is now.

What the program writes while it is copied is found by the next pass, by its digest. The last pass
is the caller's, inside the stop, when nothing changes any more.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from phosd.engine.hook_client.link import HookLink
from phosd.engine.image.manifest import CHUNK
from phosd.engine.job.progress import Progress
from phosd.engine.memory.device_memory import DeviceMemory

PASSES = 6
_SHRINKING = 0.7
"""A pass that leaves more than this share of what the one before left is the last."""
_LITTLE = 64 * CHUNK
"""Bytes that are not worth another pass."""

_T = TypeVar("_T")
Missing = Mapping[int, Sequence[_T]]
"""Chunks that are to be copied, in groups."""


def copy_while_running(
    memory: DeviceMemory,
    links: Sequence[HookLink],
    progress: Progress,
    missing: Callable[[], Missing[_T]],
    copy: Callable[[Missing[_T], Progress], object],
) -> None:
    """Copy until little is left, or as much as the pass before left, or often enough.

    ``missing`` finds what differs of what ``memory`` has, which nothing drops meanwhile.
    """
    before = None
    for number in range(1, PASSES + 1):
        progress.check()
        memory.take(links)
        with memory.drops_put_off():
            found = missing()
            left = sum(map(len, found.values())) * CHUNK
            if left <= _LITTLE or (before is not None and left > before * _SHRINKING):
                break
            before = left
            progress.phase("precopy", bytes_total=left)
            copy(found, progress)
            progress.finish()
        progress.figures.passes = number
    progress.figures.bytes_left = left
