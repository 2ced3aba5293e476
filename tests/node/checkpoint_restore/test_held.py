"""Programs without the hook whose threads poll the driver: CRIU holds them while the driver works."""

import pytest

from phosd.engine.node.node import Node
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, run_cycle, save


def test_they_go_on_where_they_were(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("polling", hooked=False)
    target.wait_for_steps(2)
    for _ in range(3):
        node.store.delete(save(node, target, "driver").id)
        target.more_steps(1)
    run_cycle(node, target, "driver", undisturbed)
