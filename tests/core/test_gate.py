"""The gate closes on running code, at random instants, and the program never notices."""

import random
import time
from collections.abc import Callable

import pytest

from phosd.engine.errors import Busy
from phosd.engine.gate import closed_gates
from phosd.engine.hooklink import HookLink
from phosd.engine.node import Node
from phosd.engine.progress import Progress
from phosd.engine.unit import gather
from tests.core.conftest import Starter
from tests.core.cycle import Undisturbed

CLOSINGS = 70


@pytest.mark.parametrize("program", ["threads", "features", "churn", "shared_pair"])
def test_closing_at_random_instants(
    program: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The programs run without a pause; ``threads`` has kernels that wait for other launches."""
    target = start(program, extra={"PHOS_TEST_PACE": "0"})
    target.wait_for_steps(2)
    chance = random.Random(program)
    refused = 0
    with gather(target.pid, node.config.runtime_dir, lambda tree: None) as unit:
        for _ in range(CLOSINGS):
            time.sleep(chance.random() * 0.05)
            began = time.monotonic()
            try:
                with closed_gates(unit.links, Progress(), deadline=5):
                    assert held(target.position, unit.links), "the program went on"
            except Busy:
                refused += 1
            assert time.monotonic() - began < 6
    target.more_steps(3)
    assert refused <= CLOSINGS // 10
    right = undisturbed(program)
    values = target.values()
    assert {s: values[s] for s in values.keys() & right.keys()} == {
        s: right[s] for s in values.keys() & right.keys()
    }


def held(position: Callable[[], int], links: list[HookLink]) -> bool:
    """Whether at most the line of a step that was computed before still appears."""
    before = position()
    time.sleep(0.02)
    return position() - before <= 64
