"""When copying begins: with a shadow slot for every chunk it is no part of the stop."""

from dataclasses import replace
from typing import Any

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from tests.node.checkpoint_restore.cycle import AFTER
from tests.node.concurrent.conftest import Starter


@pytest.mark.parametrize("limit", [None, 0])
def test_copying_begins_in_the_stop_only_where_slots_are_missing(
    limit: int | None, node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    in_the_stop = []
    drain = Mover.drain

    def noted(self: Mover, *arguments: Any, **options: Any) -> Any:
        in_the_stop.append(progress.phases[-1].stopped)
        return drain(self, *arguments, **options)

    monkeypatch.setattr(Mover, "drain", noted)
    node.config = replace(node.config, shadow_limit=limit)
    target = start("single")
    target.wait_for_steps(5)
    options = CheckpointOptions(mode="concurrent", fallback="none")
    for _ in range(2):  # the second time the program is watched
        checkpoint(node, target.pid, options, progress)
    assert in_the_stop == [limit is not None] * 2
    target.more_steps(AFTER)
