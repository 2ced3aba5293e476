"""A plant for each test, and programs that are gone when it ends."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bus import private_bus
from tests.core.conftest import place, start, undisturbed
from tests.faults.plant import Plant

__all__ = ["bus", "place", "plant", "start", "undisturbed"]


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
