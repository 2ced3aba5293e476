"""Choose the GPUs of an image by what it needs on each."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial

from phosd.engine.image.manifest import Manifest
from phosd.engine.node.gpus import GpuInfo, list_gpus
from phosd.engine.node.image_placement import ImagePlacement, place_image
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import context_bytes, free_device_memory
from phosd.engine.operations.restore.load import device_bytes
from phosd.errors import OutOfMemory


def blocks_need(
    manifest: Manifest, moves: Mapping[int, int], *, hollow: bool = False
) -> dict[int, int]:
    """Return the bytes that each GPU must have free: blocks, unless the program is to be
    ``hollow``, and a context per process with blocks. ``moves`` maps the GPUs of the image to those
    that replace them.

    GPUs without blocks are left out, because asking them would start their movers.
    """
    needs = device_bytes(manifest, moves)
    if hollow:
        needs = dict.fromkeys(needs, 0)
    for gpu, _ in {(block.gpu, block.process) for block in manifest.blocks}:
        needs[moves[gpu]] += context_bytes()
    return needs


def place(node: Node, manifest: Manifest, wanted: str, *, hollow: bool = False) -> ImagePlacement:
    """Return where the GPUs of an image are to be now. Raises as :func:`place_image`."""
    node.kept_memory.let_go_of_the_dead()  # else the GPU that it had may seem to be full
    needs, gpus = _needs(manifest, hollow=hollow), list_gpus()
    free = cache(partial(free_device_memory, node))

    def left(gpu: GpuInfo) -> int:
        return node.expected_memory.left(gpu.ordinal, free(gpu))

    try:
        return place_image(manifest, wanted, needs, gpus, left)
    except OutOfMemory:  # who expects some may have it already, and others have freed theirs
        return place_image(manifest, wanted, needs, gpus, free)


@contextmanager
def placed_image(
    node: Node, manifest: Manifest, wanted: str, *, hollow: bool = False
) -> Iterator[ImagePlacement]:
    """Return what :func:`place` does. Others that choose inside the context leave this image its
    room, if they can.
    """
    expected = node.expected_memory
    with ExitStack() as until_taken:
        with expected.choosing:
            placement = place(node, manifest, wanted, hollow=hollow)
            known = {gpu.ordinal: gpu for gpu in list_gpus()}
            saved = _needs(manifest, hollow=hollow)
            needs = {placement.moves[old]: size for old, size in saved.items() if size}
            free = partial(free_device_memory, node)
            until_taken.enter_context(expected.expect(needs, lambda gpu: free(known[gpu])))
        yield placement


def require_places(manifest: Manifest) -> None:
    """Raise as :func:`place_image` if the GPUs of this node would not do even if all were free."""
    place_image(manifest, "", _needs(manifest), list_gpus(), lambda gpu: gpu.memory_total)


def _needs(manifest: Manifest, *, hollow: bool = False) -> dict[int, int]:
    """Return the bytes that are needed in place of each GPU of the image."""
    same = {gpu.ordinal: gpu.ordinal for gpu in manifest.gpus}
    needs = blocks_need(manifest, same, hollow=hollow)
    return {gpu.ordinal: max(needs.get(gpu.ordinal, 0), gpu.needs) for gpu in manifest.gpus}
