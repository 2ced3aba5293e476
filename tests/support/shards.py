"""Distribute tests to shards, longest module first, and record the time of each area.

A pytest plugin, enabled by ``addopts``. ``--isolated N`` starts N workers, each in namespaces of
its own (``isolated.sh``); where these cannot be made, tests run one after the other. A module stays
in one shard, since its tests share buses and computed values; the tests of a module that takes
longer than ``WHOLE`` seconds are distributed one by one.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.rotation import EVERYTHING, SHORT

TESTS = Path(__file__).parent.parent
ISOLATED = Path(__file__).with_name("isolated.sh")
RECORDED = TESTS / ("durations-of-all.json" if EVERYTHING else "durations.json")
"""Seconds of each module when they were last recorded (``--record-durations``), and of its tests
that are not short, what is set up for them included; of `make test-all` in a file of its own.
"""
FAILED = TESTS.parent / "build" / "logs" / "failed-tests.log"
WHOLE = 45.0
"""Most seconds of a module that stays in one shard."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shards")
    group.addoption("--isolated", type=int, default=0, metavar="N", help="run N isolated shards")
    group.addoption("--record-durations", action="store_true", help="write tests/durations.json")
    group.addoption("--times", type=Path, help="add the seconds of each module to this file")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Turn ``--isolated`` into workers of xdist, before xdist reads its own options."""
    count = config.getoption("--isolated")
    if not count or hasattr(config, "workerinput"):
        return
    probe = subprocess.run([ISOLATED, "--probe"], capture_output=True, text=True, check=False)
    if probe.returncode:
        print(f"tests run one by one, for no namespaces can be made here: {probe.stderr.strip()}")
        return
    config.option.tx = [f"{count}*popen//python={ISOLATED} {sys.executable}"]
    config.option.dist = "loadscope"
    config.option.loadscopereorder = False
    config.option.maxworkerrestart = "0"


class _Dealing(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Distributes modules as a whole, or test by test when they are long."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return nodeid if recorded("modules").get(module, 0) > WHOLE else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Dealing(config, log)


_known: dict[str, dict[str, float]] = {}


def recorded(what: str) -> dict[str, float]:
    """Return the recorded seconds of ``modules``, or of ``tests`` by :func:`name_of`."""
    if not _known and RECORDED.exists():
        _known.update(json.loads(RECORDED.read_text()))
    return _known.get(what, {})


def name_of(nodeid: str) -> str:
    """Return the name of a test in the record, which is the same whatever its seed."""
    return re.sub(r"\d{5,}", "#", nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest modules first, so that shards end together; new modules count as long."""
    if hasattr(config, "workerinput"):
        seconds = recorded("modules")
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 1e9))


class Times:
    """Sums the seconds of each module's tests over all shards. Writes failures to
    ``build/logs/failed-tests.log`` at once, since a run takes long.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.tests: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        self.tests[name_of(report.nodeid)] += report.duration
        if report.failed:
            FAILED.parent.mkdir(parents=True, exist_ok=True)
            with FAILED.open("a") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Times(), "times")
    times = config.getoption("--times")
    if not (times and times.exists()):  # else this continues the same suite
        FAILED.unlink(missing_ok=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    times = config.pluginmanager.get_plugin("times")
    if times is None:
        return
    if path := config.getoption("--times"):
        _add(path, times.seconds)
    if config.getoption("--record-durations"):
        RECORDED.write_text(_record(times.seconds, times.tests))


def _record(modules: Mapping[str, float], tests: Mapping[str, float]) -> str:
    """Return the record with what this run has measured, and what earlier ones have of tests that
    it has not played and that are still there.
    """
    kept = {}
    for what, new in (("modules", modules), ("tests", tests)):
        old = {n: s for n, s in recorded(what).items() if _file(n).exists()}
        kept[what] = old | {name: round(seconds, 1) for name, seconds in new.items()}
    kept["tests"] = {n: s for n, s in kept["tests"].items() if s >= 2 * SHORT}
    return json.dumps(kept, indent=0, sort_keys=True) + "\n"


def _file(name: str) -> Path:
    return TESTS.parent / name.partition("::")[0]


def _add(path: Path, seconds: dict[str, float]) -> None:
    """Add the seconds to those in the file, which another run of the same suite may have
    written.
    """
    sums: dict[str, float] = defaultdict(float)
    for known in (json.loads(path.read_text()) if path.exists() else {}), seconds:
        for module, each in known.items():
            sums[module] += each
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sums))
