"""A node in folders of its own, and target programs that are gone when the test ends."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phosd.engine import Node, NodeConfig
from phosd.engine.system import memory_mount
from phosd.engine.system.freezer import Freezer
from tests.support import harness

Starter = Callable[..., harness.Target]


def named_shelf(runtime: Path) -> Path:
    """Where a node with this runtime folder keeps what suspended programs had, if it can mount
    nothing, or is of an earlier version.
    """
    name = hashlib.sha256(bytes(runtime.resolve())).hexdigest()[:16]
    return Path(f"/dev/shm/phos-suspended-{name}")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short name: the paths of unix sockets end after 108 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="phos-"))
    yield folder
    Freezer(folder / "run").remove_left(lambda _: True)
    memory = folder / "run/memory"
    while memory.is_mount():  # with what programs had that were killed in their sleep
        assert memory_mount.unmount(memory) == ""
    shutil.rmtree(folder)
    if (shelf := named_shelf(folder / "run")).exists():
        shutil.rmtree(shelf)


@pytest.fixture
def node(place: Path) -> Iterator[Node]:
    """A node whose images and sockets live in ``place``."""
    with Node(NodeConfig(state_dir=place / "state", runtime_dir=place / "run")) as made:
        yield made


@pytest.fixture
def start(place: Path) -> Iterator[Starter]:
    """Start a target of this node; everything that was started is killed at the end."""
    targets: list[harness.Target] = []

    def starter(program: str, **options: Any) -> harness.Target:
        targets.append(harness.start(program, place, runtime=place / "run", **options))
        return targets[-1]

    yield starter
    for target in targets:
        target.kill()


@pytest.fixture(scope="session")
def undisturbed() -> Callable[..., dict[int, str]]:
    """The values that a program computes when nobody touches it, without the hook: of so many
    steps, at least.
    """

    def values(
        program: str, steps: int = 60, compared: harness.Target | None = None
    ) -> dict[int, str]:
        return harness.undisturbed(program, steps, compared=compared)

    return values
