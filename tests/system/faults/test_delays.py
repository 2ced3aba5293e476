"""Checkpoints whose steps are delayed at random, in phosd, its movers and the hook.

Whoever waits for a word gets it, however late; nobody waits longer than a job may take.
"""

import random
import time

import pytest

from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, check, computes_right
from tests.support.harness import SELDOM
from tests.support.rotation import EVERYTHING, seeds
from tests.system.faults.daemon_under_fault import Plant, leftovers, partial

CHECKPOINTS = 40 if EVERYTHING else 4
"""In one test; `make soak` plays 2,000."""
LONGEST_DELAY = 0.5
"""Seconds; a step is delayed by a fifth of that on average."""
MOST = 45.0
"""Seconds that a checkpoint takes at most: some 30 steps, each twice, and its gate's deadline."""
MODES = ("concurrent", "recopy", "stop", "driver", "auto")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds("delays", 1, whole=1))
def test_checkpoints_with_delays(
    seed: int, plant: Plant, start: Starter, undisturbed: Undisturbed
) -> None:
    rng = random.Random(seed)
    target = start(
        rng.choice(("single", "threads", "workers")),
        extra=SELDOM | {"PHOS_FAULT_DELAY": str(LONGEST_DELAY / 10)},
    )
    target.wait_for_steps(3)
    plant.start(delay=LONGEST_DELAY)
    took = []
    for _ in range(CHECKPOINTS):
        mode = rng.choice(MODES)
        began = time.monotonic()
        outcome = plant.end_of(plant.checkpoint(target.pid, mode))
        took.append(time.monotonic() - began)
        assert outcome == "done", (mode, plant.last())
        for image in plant.images()[:-2]:
            plant.call("DeleteImage", "sa{sv}", image, 0)
    assert max(took) < MOST
    computes_right(target, undisturbed)
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    mark = target.position()
    restored = plant.end_of(plant.begin("Restore", "sa{sv}", plant.images()[-1], 0))
    assert restored == "done", plant.last()
    restored_values = target.wait_for_steps(AFTER, since=mark)
    check(restored_values, original, undisturbed(target.program))
    plant.stop()
    assert not partial(plant.place) and not leftovers(plant.place)
