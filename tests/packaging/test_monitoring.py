"""The alert rules and the dashboard that the package installs: they ask for what phosd serves, and
name commands that there are. Prometheus itself reads them where `make test-all` has installed it.
"""

import json
import re
import runpy
import subprocess
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from phosd.cli.main import main as phos
from phosd.protection import Protection
from tests.support.rotation import EVERYTHING

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "packaging/monitoring"
RULES = MONITORING / "phosd.rules.yml"
DASHBOARD = json.loads((MONITORING / "phosd.dashboard.json").read_text())
PROMTOOL = ROOT / "build/prometheus/bin/promtool"
VARIABLES = {"$__rate_interval": "5m"}
SINCE_SCRAPED = {"up": {"job"}}
"""What Prometheus knows itself, by its labels."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def queries() -> list[str]:
    """All queries of both files."""
    asked = [query["expr"] for panel in DASHBOARD["panels"] for query in panel["targets"]]
    return [*(rule["expr"] for rule in rules()), *asked]


def served() -> Mapping[str, set[str]]:
    """The labels of each series: those of the table, which another test compares with phosd."""
    page = (ROOT / "docs/reference/dbus.md").read_text()
    found: dict[str, set[str]] = {}
    for name, kind, words in re.findall(r"(?m)^\| `(phosd_\w+)` \| (\w+) \| (.*?) \|", page):
        labels = {*re.findall(r"`(\w+)`", words)}
        if kind == "histogram":
            found |= {f"{name}_{part}": labels for part in ("sum", "count")}
            found[f"{name}_bucket"] = labels | {"le"}
        else:
            found[name] = labels
    return found


def selectors(query: str) -> Iterator[Any]:
    """What a query asks for. Raises :class:`ValueError` if it is no PromQL."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(query), visit)
    assert found, query
    return iter(found)


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_what_phosd_serves(query: str) -> None:
    known = {**served(), **SINCE_SCRAPED}
    for selector in selectors(query):
        labels = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert selector.name in known, query
        assert labels.keys() <= known[selector.name] | {"instance"}, query
        words = labels.get("protection", "").split("|")
        assert {*words} <= {"", *map(str, Protection)}, query


def test_a_misspelt_name_would_be_found() -> None:
    (selector,) = selectors('sum(rate(phosd_programms{protection="late"}[$__rate_interval]))')
    assert selector.name not in served()
    with pytest.raises(ValueError):
        selectors("sum(phosd_programs")


def test_each_alert_says_what_to_do() -> None:
    """With commands that there are."""
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) > 4
    commands = {*phos.commands}
    for rule in found:
        told = rule["annotations"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert told["summary"] and not told["summary"].endswith(".")
        named = re.findall(r"`phos ([a-z-]+)", told["description"])
        assert named and {*named} <= commands, rule["alert"]


def test_each_alert_is_in_the_documentation_and_has_a_test() -> None:
    names = [rule["alert"] for rule in rules()]
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    assert re.findall(r"(?m)^\| `(Phosd\w+)` \|", page) == names
    tests = yaml.safe_load((ROOT / "tests/packaging/alerts.yml").read_text())["tests"]
    for name in names:
        asked = [each for test in tests for each in test["alert_rule_test"]]
        fires = [bool(each.get("exp_alerts")) for each in asked if each["alertname"] == name]
        assert {*fires} == {True, False}, name


def test_the_dashboard_can_be_imported() -> None:
    """It names no data source of somebody's, and its panels do not lie upon each other."""
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "node"]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"] and panel["description"]
        sources = [panel["datasource"], *(query["datasource"] for query in panel["targets"])]
        assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in sources)
        assert all('instance=~"$node"' in query["expr"] for query in panel["targets"])
        references = [query["refId"] for query in panel["targets"]]
        assert len({*references}) == len(references)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_the_package_has_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "packaging")
    runpy.run_path(str(ROOT / "packaging/build_deb.py"))["add_for_others"](tmp_path)
    installed = tmp_path / "usr/share/phos/monitoring"
    assert {path.name for path in installed.iterdir()} == {RULES.name, "phosd.dashboard.json"}
    assert (installed / RULES.name).read_bytes() == RULES.read_bytes()


@pytest.mark.skipif(not EVERYTHING, reason="`make test-all` installs Prometheus")
@pytest.mark.parametrize(
    "words", [("check", "rules", RULES), ("test", "rules", "tests/packaging/alerts.yml")]
)
def test_prometheus_agrees(words: tuple[object, ...]) -> None:
    done = subprocess.run(
        [PROMTOOL, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
