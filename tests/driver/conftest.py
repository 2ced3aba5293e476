"""The processes of the probes, and what a run tells of the table."""

from collections.abc import Iterator
from typing import Any, Protocol

import pynvml
import pytest

from phosd.engine.system.cuda import is_software
from tests.driver.behaviours import SECTIONS
from tests.driver.subjects import Control, Origin, Subject

ROWS = {row.probe: row for section in SECTIONS for row in section.rows}


class Starter(Protocol):
    """Starts a process that runs this code first, with these environment variables."""

    def __call__(self, code: str = "use()", **settings: str) -> Subject: ...


def driver_version() -> str:
    """Return the version of the real driver as the table has it, such as 580.159."""
    pynvml.nvmlInit()
    version = pynvml.nvmlSystemGetDriverVersion()
    return ".".join((version if isinstance(version, str) else version.decode()).split(".")[:2])


def pytest_report_header() -> str:
    return f"probes {'the software GPU' if is_software() else f'driver {driver_version()}'}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the rows that the real driver's version has to be added to."""
    if is_software():
        return
    version = driver_version()
    passed = [report.nodeid.rpartition("::")[2] for report in terminalreporter.getreports("passed")]
    new = [ROWS[name].id for name in passed if name in ROWS and version not in ROWS[name].seen]
    if new:
        terminalreporter.write_line(f"now seen with driver {version}: {', '.join(new)}")


@pytest.fixture(autouse=True)
def enough_gpus(request: pytest.FixtureRequest) -> None:
    if ROWS[request.node.name].gpus > 1:
        request.getfixturevalue("two_gpus")


@pytest.fixture
def software() -> bool:
    """Whether the software GPU is probed, for rows that say how it differs."""
    return is_software()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    it = Origin(tmp_path_factory.mktemp("driver"))
    yield it
    it.end()


@pytest.fixture
def start(origin: Origin) -> Iterator[Starter]:
    started: list[Subject] = []

    def one(code: str = "use()", **settings: str) -> Subject:
        it = Subject(origin.start(**settings))
        started.append(it)
        it.ask(code)
        return it

    yield one
    for it in started:
        it.kill()


@pytest.fixture
def control(origin: Origin) -> Iterator[Control]:
    it = Control(origin.start())
    it.ask("ck(d.cuInit(0))")
    yield it
    it.kill()
