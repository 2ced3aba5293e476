"""A plant for each test, and programs that are gone when it ends."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checkpoint_restore.conftest import start, undisturbed
from tests.node.concurrent.conftest import surroundings
from tests.node.concurrent.conftest import undisturbed as variant_undisturbed
from tests.support.bus import private_bus
from tests.system.faults.daemon_under_fault import Plant

__all__ = ["bus", "plant", "start", "surroundings", "undisturbed", "variant_undisturbed"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder on a disk, which /tmp may not be: movers write to memory in another way."""
    folder = Path(tempfile.mkdtemp(prefix="phos-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def bus() -> Iterator[str]:
    """A bus that no other daemon has a name on."""
    with (
        tempfile.TemporaryDirectory(prefix="phos-bus-") as folder,
        private_bus(Path(folder)) as address,
    ):
        yield address


@pytest.fixture
def plant(bus: str, place: Path) -> Iterator[Plant]:
    made = Plant(bus, place)
    (place / "run").mkdir()
    yield made
    made.close()
