"""Random programs, checkpointed at random instants; docs in ``programs/random_work.py``."""

import random
import time

import pytest

from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions
from tests.node.checkpoint_restore.cycle import AFTER, bring_back, check
from tests.node.concurrent.conftest import Starter
from tests.node.concurrent.stop_image import differences
from tests.node.concurrent.watch import Watch, slow_movers
from tests.support.harness import Target, wait_until
from tests.support.rotation import seeds

BATCH = 20
"""Programs that one process runs, of which one is killed and restored."""
BATCHES = seeds("random programs", 1, whole=10)
"""Batch n has the programs from n * BATCH on."""
SECONDS = 0.15
"""About how long the copying takes."""
LATEST = 0.05
"""Seconds after which the checkpoint of a program begins at the latest."""


def begins(target: Target, number: int) -> bool:
    """Wait until program ``number`` computes; whether it hides what it writes."""

    def line() -> str | None:
        for text in target.log.read_text().splitlines():
            if text.split()[:2] == ["program", str(number)]:
                return text
        return None

    found = wait_until(line, f"program {number} to begin")
    target.more_steps(1)
    return found.endswith("hides")


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshot", "on_write"])
@pytest.mark.parametrize("batch", BATCHES)
def test_random_programs(batch: int, node: Node, start: Starter) -> None:
    first = batch * BATCH
    chance = random.Random(first)
    target = start("random_work", str(first), PHOS_TEST_PACE="0.004")  # little time, many steps
    begins(target, first)
    numbers = range(first, first + BATCH)
    killed = chance.choice(numbers)
    with slow_movers(node, target, SECONDS):
        for number in numbers:
            hides = begins(target, number)
            time.sleep(chance.uniform(0, LATEST))
            options = CheckpointOptions(mode="concurrent", fallback="auto" if hides else "none")
            watch = Watch(node, target)
            manifest = watch.checkpoint(options)
            assert differences(node.store, manifest.id, watch.memories) == []
            assert hides or (manifest.mode, manifest.wrong_guesses) == ("concurrent", 0)
            if number == killed:
                target.more_steps(AFTER)
                target.kill()
                original = target.values()
                check(bring_back(node, target, manifest.id), original, {})
            node.store.delete(manifest.id)
            (target.log.parent / f"end-{number}").touch()
