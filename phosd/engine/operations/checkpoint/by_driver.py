"""Checkpoint in mode ``driver``: the driver and CRIU save everything, device memory included."""

from phosd.engine.image.manifest import Block
from phosd.engine.memory.parking import detached, own_again
from phosd.engine.operations.checkpoint.attempt import Attempt


def by_driver(attempt: Attempt) -> tuple[Block, ...]:
    """Save the group without packs. Returns no blocks: they are in the processes' host memory."""
    group, progress = attempt.group, attempt.progress
    attempt.node.kept_memory.let_go(group)
    own_again(group.links, progress, attempt.options.deadline)
    attempt.cpu.prepare(group.trees)
    progress.phase("detach")
    with detached(group.links):
        attempt.save_held_processes()
    progress.finish()
    return ()
