"""Programs made to be guessed wrong: each wrong guess is found, what is published is right, and the
kernel is named. And programs that look as if they would be guessed wrong, and are not.

``PHOS_TEST_INSTANTS`` is at how many instants each of the former is checkpointed (2).
"""

import os
import random
import time

import pytest

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions
from phosd.errors import MisSpeculation
from tests.node.checkpoint_restore.cycle import AFTER, bring_back, check
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.watch import Watch, braked_movers, watched
from tests.support.harness import Target

INSTANTS = int(os.environ.get("PHOS_TEST_INSTANTS", "2"))
ITERATIONS = 16
"""Steps that a program makes while it is copied, at the least: enough to write all its memory."""

TRIES = 5
"""A checkpoint in which it makes fewer, for the machine was busy elsewhere, tells nothing."""

GUILTY = {
    "chase": "chase",
    "chase_pinned": "chase",
    "chase_in_graph": "chase",
    "linked": "follow",
    "neighbour": "overrun",
    "masked": "masked",
    "opaque": "opaque",
    "packed": "packed",
    "halves": "halves",
    "through_global": "through_global",
    "through_constant": "through_constant",
    "stored_map": "mapped_elsewhere",
    "host": "",  # no kernel at all
}
"""Ways of ``programs/wrong.py``, and the kernels that write there."""

RIGHT = (
    *(
        "by_value",
        "extra",
        "stale",
        "mapped",
        "side_by_side",
        "twice_mapped",
        "updated_graph",
        "replaced_graph",
        "nested_graph",
    ),
    *("one_chunk", "thread_streams", "default_stream", "pinned", "reallocated"),
)
"""Ways of ``programs/right.py``."""


def continues(node: Node, target: Target, image: str, right: dict[int, str], way: str = "") -> None:
    """Kill the target and restore the image: it computes on as it did, and as it should."""
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, image), original, right)


@pytest.mark.rotated(of=6)
@pytest.mark.parametrize("way", GUILTY)
def test_a_wrong_guess(way: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("wrong", way)
    target.wait_for_steps(5)
    chance = random.Random(way)
    for _ in range(INSTANTS):
        time.sleep(chance.uniform(0, 0.02))
        options = CheckpointOptions(mode="concurrent", fallback="none")
        manifest, watch = guessed_wrong(node, target, options)
        assert manifest is None, "an image was published"
        assert node.store.list() == [], "an image was published"
        assert GUILTY[way] in {mark.name for mark in watch.progress.suspects} | {""}
    manifest, watch = guessed_wrong(node, target, CheckpointOptions(mode="concurrent"))
    assert manifest is not None
    assert manifest.mode in ("recopy", "stop")
    assert GUILTY[way] in {mark.name for mark in watch.progress.suspects} | {""}
    if GUILTY[way]:
        known = CheckpointHistory(tuple(watch.progress.suspects))
        options = CheckpointOptions(mode="concurrent", fallback="none", experience=known)
        with braked_movers(node, target, ITERATIONS) as brake:
            manifest, _ = watched(node, target, options, brake)
        assert (manifest.mode, manifest.wrong_guesses) == ("concurrent", 0)
    continues(node, target, manifest.id, undisturbed("wrong", way))


@pytest.mark.rotated(of=6)
@pytest.mark.parametrize("way", RIGHT)
def test_a_right_guess(way: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("right", way)
    target.wait_for_steps(5)
    image = guessed_right(node, target)
    continues(node, target, image, undisturbed("right", way))


def test_a_shadow_that_was_copied_in_half(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """What was set aside is not believed either: the digest of the stop decides."""
    target = start("right", "by_value", PHOS_FAULT="hook-shadow:1:short")
    target.wait_for_steps(5)
    manifest, watch = guessed_wrong(node, target, CheckpointOptions(mode="concurrent"))
    assert manifest is not None
    assert (manifest.mode, manifest.wrong_guesses) == ("recopy", 1)
    assert watch.progress.figures.wrong_chunks
    continues(node, target, manifest.id, undisturbed("right", "by_value"))


def guessed_wrong(
    node: Node, target: Target, options: CheckpointOptions
) -> tuple[Manifest | None, Watch]:
    """A checkpoint in which the program wrote while it was copied, and its image, if there is
    one.

    On a busy machine what it writes may have been saved before it came to that; the image is right
    in any case.
    """
    came_far = False
    for _ in range(TRIES):
        with braked_movers(node, target, ITERATIONS) as brake:
            watch = Watch(node, target, brake)
            try:
                manifest = watch.checkpoint(options)
            except MisSpeculation:
                return None, watch
        watch.require_right(manifest)
        if manifest.wrong_guesses:
            return manifest, watch
        came_far |= watch.steps_in("drain") >= ITERATIONS
        node.store.delete(manifest.id)
    raise AssertionError(
        "nobody noticed"
        if came_far
        else "the program never wrote all its memory while it was copied"
    )


def guessed_right(node: Node, target: Target) -> str:
    """An image that was made while the program made steps enough to be guessed wrong."""
    options = CheckpointOptions(mode="concurrent", fallback="none")
    for _ in range(TRIES):
        with braked_movers(node, target, ITERATIONS) as brake:
            manifest, watch = watched(node, target, options, brake)
        assert manifest.mode == "concurrent"
        if watch.steps_in("drain") >= ITERATIONS:
            return manifest.id
    raise AssertionError("the program never wrote all its memory while it was copied")


def test_default_streams_of_threads(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Through the functions that a program gets when it asks for such streams."""
    target = start("right", "default_stream", CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1")
    target.wait_for_steps(5)
    image = guessed_right(node, target)
    continues(node, target, image, undisturbed("right", "default_stream"))
