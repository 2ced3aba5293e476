"""A program that frees and allocates on a full GPU while its memory is copied to another."""

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.errors import OutOfMemory
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.node.concurrent.conftest import surroundings
from tests.node.concurrent.conftest import undisturbed as variant_undisturbed
from tests.node.concurrent.test_pressure import whole
from tests.node.moves.random_moves import gpus_of
from tests.support.gpu_memory import taken

__all__ = ["surroundings", "variant_undisturbed"]

SLOW = "60M"
"""Bytes a second that the movers copy: the program frees and allocates many times meanwhile."""


@pytest.mark.parametrize("way", ["reallocated", "turned_over"])
def test_freed_memory_is_there_again(
    way: str,
    node: Node,
    start: Starter,
    surroundings: dict[str, str],
    variant_undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never has less than it had: it ends with an error when an allocation fails."""
    target = start("right", arguments=("0", way), extra=surroundings)
    target.wait_for_steps(8)
    with monkeypatch.context() as patch:
        patch.setenv("PHOS_SOFTGPU_COPY_RATE", SLOW)
        node.movers.mover(0), node.movers.mover(1)
    with whole(node, target):
        full = taken(0)
        full.__enter__()
    try:
        for _ in range(5):
            before = target.position()
            try:
                migrate(node, target.pid, MigrateOptions("1"), Progress())
                break
            except OutOfMemory:  # of the job, which gave up for the program's sake
                target.wait_for_steps(2, since=before)
        target.more_steps(5)
    finally:
        full.__exit__(None, None, None)
    assert gpus_of(node, target) == (1,)
    values = target.values()
    right = variant_undisturbed("right", way, steps=max(values) + 1)
    assert values.items() <= right.items()
