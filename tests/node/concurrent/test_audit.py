"""What the guess saved without need is counted when it is asked for, and only then.

That the count is right is tested with the mover.
"""

import pytest

from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions
from tests.node.concurrent.conftest import Starter
from tests.node.concurrent.watch import slow_movers, watched


@pytest.mark.parametrize("audit", [True, False])
def test_needless_shadows_are_counted_on_request(audit: bool, node: Node, start: Starter) -> None:
    target = start("single")
    target.wait_for_steps(5)
    with slow_movers(node, target, 0.5):
        _, watch = watched(node, target, CheckpointOptions(mode="concurrent", audit=audit))
    figures = watch.progress.figures
    needless, shadowed = figures.needless_shadows, figures.shadowed_chunks
    assert shadowed is not None
    if audit:
        assert needless is not None
        assert 0 <= needless <= shadowed
    else:
        assert needless is None
