"""Copy memory in passes while the program runs; each copies the chunks that differ from the copy.

The next pass finds by digest what the program wrote during a pass. The last pass is the caller's:
it runs inside the stop, when nothing changes any more. Digests are the GPU's, and no kernel may run
beside a program that GPUs do not interrupt (hazard 47): then everything is copied in one pass, or
nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from phosd.engine.hook_client.link import HookLink
from phosd.engine.image.manifest import CHUNK
from phosd.engine.job.progress import Progress
from phosd.engine.memory.device_memory import DeviceMemory

PASSES = 6
_SHRINKING = 0.7
"""A pass is the last if it leaves more than this share of what the pass before left."""
_LITTLE = 64 * CHUNK
"""Bytes that are not worth another pass."""

_T = TypeVar("_T")
Missing = Mapping[int, Sequence[_T]]
"""Chunks to copy, in groups."""


def copy_while_running(
    memory: DeviceMemory,
    links: Sequence[HookLink],
    progress: Progress,
    missing: Callable[[], Missing[_T]],
    copy: Callable[[Missing[_T], Progress], object],
    *,
    passes: int = PASSES,
) -> None:
    """Copy until little is left, a pass no longer reduces it much, or ``passes`` are done.

    ``missing`` returns the chunks of ``memory`` that may differ from the copy; no block is dropped
    meanwhile.
    """
    before = None
    for number in range(1, passes + 1):
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
