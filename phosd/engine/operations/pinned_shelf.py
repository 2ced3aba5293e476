"""Pin what hollow programs have in host memory, so that it is loaded at the rate of the link."""

import logging
import os
from collections import defaultdict
from contextlib import ExitStack

from phosd.engine.image import private_files
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.store import Store
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.errors import PhosError

_log = logging.getLogger(__name__)


def keep_pinned(node: Node, hollow: Suspended) -> None:
    """Pin the packs of a hollow program until it is resumed, and have the movers of its GPUs stand
    by. If that fails, which is logged, its resume takes longer.
    """
    shelf = node.suspend_store.shelf_of(hollow)
    try:
        node.movers.begin(hollow.gpus)
        with shelf.open(hollow.image, known=True) as image, ExitStack() as opened:
            for gpu, packs in _by_gpu(image.manifest).items():
                files = [_writable(shelf, number, opened) for number in sorted(packs)]
                mover = node.movers.mover(gpu)
                mover.unpin(mover.pin(files), keep=True)
    except (PhosError, OSError) as error:
        _log.warning("what process %d has in memory is not pinned: %s", hollow.pid, error)


def _writable(shelf: Store, number: int, opened: ExitStack) -> int:
    """Open a pack as the driver wants what it pins."""
    file = private_files.open_private(shelf.pack_path(number), os.O_RDWR)
    opened.callback(os.close, file)
    return file


def forget_removed(node: Node, hollow: Suspended) -> None:
    """Unpin what is gone since a program was resumed: then its memory is free."""
    for mover in node.movers.running(hollow.gpus):
        try:
            mover.unpin(mover.pin(()), keep=True)
        except PhosError as error:
            _log.warning("memory of GPU %d stays pinned: %s", mover.gpu, error)


def _by_gpu(manifest: Manifest) -> dict[int, set[int]]:
    packs: defaultdict[int, set[int]] = defaultdict(set)
    for block in manifest.blocks:
        packs[block.gpu].update(chunk.pack for chunk in block.chunks)
    return packs
