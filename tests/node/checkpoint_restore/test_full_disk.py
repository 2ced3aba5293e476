"""A disk that somebody else fills while the program stands still, and the program survives."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.errors import OutOfSpace
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right, run_cycle
from tests.node.checkpoint_restore.test_trouble import at_phase


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one image and more."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512m,mode=700", "phos-test", str(tmp_path)], check=True
    )
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    path = disk / "of-somebody-else"
    status = os.statvfs(disk)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
    return path


@pytest.mark.parametrize("mode", ["stop", "driver"])
@pytest.mark.parametrize("phase", ["control", "persist"])
def test_somebody_else_fills_the_disk(
    phase: str, mode: str, disk: Path, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """After the estimate found enough room."""
    with Node(NodeConfig(state_dir=disk / "state", runtime_dir=place / "run")) as node:
        target = start("single")
        target.wait_for_steps(3)
        filled: list[Path] = []
        progress = at_phase(phase, lambda _: filled.append(fill(disk)))
        with pytest.raises(OutOfSpace, match="delete images"):
            checkpoint(node, target.pid, CheckpointOptions(mode=mode), progress)
        assert node.store.list() == []
        computes_right(target, undisturbed)
        filled[0].unlink()
        assert node.store.sweep() == [], "the failed job left something"
        run_cycle(node, target, mode, undisturbed)
