"""A program that frees and allocates on a full GPU while its memory is copied to another."""

import pytest

from phosd.engine.errors import OutOfMemory
from phosd.engine.migrate import MigrateOptions, migrate
from phosd.engine.node import Node
from phosd.engine.progress import Progress
from tests.concurrent.conftest import surroundings
from tests.concurrent.conftest import undisturbed as variant_undisturbed
from tests.concurrent.test_pressure import whole
from tests.core.conftest import Starter
from tests.core.cycle import Undisturbed
from tests.migrate.test_midway import taken
from tests.migrate.walk import gpus_of

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
        node.mover(0), node.mover(1)
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
