"""A package of this checkout, a Debian to put it on, and machines that are booted from that."""

import hashlib
import inspect
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.boot import machine, target
from tests.boot.machine import Machine
from tests.boot.package import REPOSITORY, build_package, install, locked_cache

SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""The Debian that comes with the Python which the package is built for."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its machines have said of late."""
    report = yield
    if call.excinfo is not None and isinstance(item, pytest.Function):
        for started in item.funcargs.values():
            if isinstance(started, Machine):
                report.sections.append(("journal", started.last_words()))
    return report


@pytest.fixture(scope="session")
def base_tree() -> Path:
    """A Debian tree without phosd: made once for each release and each way of making it."""
    suite = SUITES[sys.version_info[:2]]
    content = inspect.getsource(machine.prepare) + repr((machine.PACKAGES, machine.MASKED))
    key = hashlib.sha256(content.encode()).hexdigest()[:12]
    with locked_cache() as cache:
        tree = cache / f"{suite}-{key}"
        if not tree.exists():
            for old in (*cache.glob(f"{suite}-*"), cache / "fresh"):
                shutil.rmtree(old, ignore_errors=True)
            script = REPOSITORY / "tests/setup/debian_tree.sh"
            packages = ",".join(machine.PACKAGES)
            subprocess.run([script, suite, cache / "fresh", packages], check=True)
            machine.prepare(cache / "fresh")
            (cache / "fresh").rename(tree)
    return tree


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian package of this checkout."""
    return build_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def plain(base_tree: Path) -> Iterator[Machine]:
    """A booted machine without phosd, which the tests of a module share."""
    with machine.booted(base_tree) as started:
        target.prepare(started)
        yield started


@pytest.fixture(scope="module")
def booted(base_tree: Path, package: Path) -> Iterator[Machine]:
    """A booted machine on which the package is installed and phosd runs, a module's own."""
    with machine.booted(base_tree) as started:
        target.prepare(started)
        install(started, package)
        yield started
