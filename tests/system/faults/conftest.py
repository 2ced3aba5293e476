"""A plant for each test, and programs that are gone when it ends."""

import shutil
import tempfile
from collections.abc import Generator, Iterator
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the daemons of a failed test have said: their log goes with their folder."""
    report = yield
    made = getattr(item, "funcargs", {}).get("plant")
    if report.failed and isinstance(made, Plant):
        report.sections.append(("phosd's log", made.said().decode(errors="replace")))
    return report


@pytest.fixture
def plant(bus: str, place: Path) -> Iterator[Plant]:
    made = Plant(bus, place)
    (place / "run").mkdir()
    yield made
    made.close()
