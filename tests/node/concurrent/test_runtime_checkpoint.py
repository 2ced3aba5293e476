"""A runtime saves a program that runs on; no runtime is there, whose CRIU would hold it."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from phosd.engine.criu.dump.runtime_dump import RuntimeDump
from phosd.engine.image import foreign_folder
from phosd.engine.job.checkpoint_history import NONE, CheckpointHistory
from phosd.engine.node.node import Node
from phosd.engine.operations import runtime_checkpoint
from phosd.errors import ImageCorrupt, MisSpeculation
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.stop_image import differences
from tests.node.concurrent.watch import Watch, braked_movers
from tests.support.harness import Target

ITERATIONS = 16
"""Steps that the program makes while it is copied, at the least: enough to write all its memory."""
TRIES = 5
"""If the machine is busy elsewhere it may make fewer, and then nothing is guessed wrong."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    """The runtime's, open."""
    found = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield found
    os.close(found)


def saved(node: Node, target: Target, folder: int, experience: CheckpointHistory) -> Watch:
    """Save it, and let it go at once when it stands still. The watch knows of wrong guesses."""

    def dumped() -> None:
        dump.held()
        dump.over(complete=True)

    dump = RuntimeDump(lambda: threading.Thread(target=dumped).start())
    with braked_movers(node, target, ITERATIONS) as brake:
        watch = Watch(node, target, brake)

        def save() -> object:
            return runtime_checkpoint.checkpoint(
                node, target.pid, folder, dump, experience, watch.progress
            )

        with suppress(MisSpeculation):
            watch.during("concurrent", save)
    return watch


def test_a_wrong_guess_fails_it_and_is_not_made_again(
    node: Node, start: Starter, undisturbed: Undisturbed, folder: int
) -> None:
    """There is no second attempt: CRIU makes none."""
    target = start("wrong", "chase")
    target.wait_for_steps(5)
    for _ in range(TRIES):
        watch = saved(node, target, folder, NONE)
        if watch.progress.wrong_guesses:
            break
    assert watch.progress.wrong_guesses == 1
    with (
        pytest.raises(ImageCorrupt, match="was not written to the end"),
        foreign_folder.opened(folder, foreign_folder.saved_in(folder), node.store),
    ):
        pass
    target.more_steps(2)
    known = CheckpointHistory(tuple(watch.progress.suspects))
    watch = saved(node, target, folder, known)
    assert watch.progress.wrong_guesses == 0
    shelf = node.suspend_store.shelf("disk")
    with foreign_folder.opened(folder, foreign_folder.saved_in(folder), node.store) as image:
        manifest = foreign_folder.bring(image, shelf, lambda _: None)
    assert differences(shelf, manifest.id, watch.memories) == []
    shelf.delete(manifest.id)
    steps = max(target.more_steps(2)) + 1
    right = undisturbed("wrong", "chase", steps=steps, compared=target)
    assert target.values().items() <= right.items()
