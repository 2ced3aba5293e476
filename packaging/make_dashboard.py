"""Draw docs/pictures/dashboard.svg: the dashboard of packaging/monitoring, with a node's figures.

    python packaging/make_dashboard.py [--seconds 150]

Starts a private bus, phosd and three trainings of ``phos demo`` that are saved, suspended, resumed
and lost, and a Prometheus of Debian's that looks at phosd each second; then asks it each panel's
questions, and draws the answers where the panels are. It is no Grafana: colours and letters are
ours. On a machine without a GPU the programs get the software GPU. Needs root, as CRIU does.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any

from make_pictures import FOLDER, begun

from phosd.client import AsyncClient
from phosd.demo import stage
from phosd.engine.system.native import python_environment
from phosd.units import human_bytes

_ROOT = Path(__file__).parents[1]
DASHBOARD = _ROOT / "packaging/monitoring/phosd.dashboard.json"
PROMETHEUS = _ROOT / "build/prometheus/bin/prometheus"
_PORTS = 19476, 19477
"""The ports of phosd's metrics and of Prometheus."""
_RATE = "20s"
_COLUMN, _ROW, _GAP = 46, 32, 4
_HEAD = 26
"""Height of a panel's title."""
_LINES = ("#3274d9", "#56a64b", "#ff9830", "#e02f44", "#a352cc", "#8ab8ff", "#b9b900")
_NAMED = {"green": 1, "blue": 0, "orange": 2, "red": 3, "purple": 4, "yellow": 6}
"""Which of them a colour of the dashboard is."""
_STATES = {"green": "#1a7f37", "orange": "#bc4c00", "red": "#cf222e"}

Series = list[tuple[str, list[tuple[float, float]]]]
"""The name of each line, and its points: seconds and value."""


class Prometheus:
    """A running Prometheus."""

    def ask(self, path: str, **query: object) -> Any:
        """Return what it answers."""
        asked = urllib.parse.urlencode(query)
        url = f"http://127.0.0.1:{_PORTS[1]}/api/v1/{path}?{asked}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.load(reply)["data"]["result"]

    def value(self, expression: str) -> float:
        """Return the value of an expression that has one."""
        found = self.ask("query", query=meant(expression))
        return float(found[0]["value"][1]) if found else 0.0

    def lines(self, panel: dict[str, Any], seconds: float) -> Series:
        """Return the lines of a panel, of the last so many seconds."""
        now, found = time.time(), Series()
        for target in panel["targets"]:
            span = {"start": now - seconds, "end": now, "step": 1}
            for each in self.ask("query_range", query=meant(target["expr"]), **span):
                name = target.get("legendFormat") or ""
                for label, text in each["metric"].items():
                    name = name.replace("{{" + label + "}}", text)
                points = [(at - now + seconds, float(v)) for at, v in each["values"] if v != "NaN"]
                found.append((name, points))
        return found


def meant(expression: str) -> str:
    """Return an expression with the dashboard's variables filled in."""
    return expression.replace("$node", ".*").replace("$__rate_interval", _RATE)


def figure(value: float, unit: str) -> str:
    """Format a value as its panel's unit says."""
    match unit:
        case "s":
            return f"{value:.3g} s"
        case "percentunit":
            return f"{value:.0%}"
        case "bytes":
            return human_bytes(value)
        case "Bps":
            return f"{human_bytes(value)}/s"
    return f"{value:.3g}"


def text(
    x: float, y: float, words: str, *, kind: str = "", end: bool = False, size: int = 0
) -> str:
    """Return a line of text."""
    more = ' text-anchor="end"' if end else ""
    more += f' class="{kind}"' if kind else ""
    more += f' font-size="{size}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


def single(
    panel: dict[str, Any], value: float, place: tuple[float, float, float, float]
) -> list[str]:
    """Draw a panel of one value, in the colour of its threshold."""
    x, y, width, height = place
    defaults = panel["fieldConfig"]["defaults"]
    steps = [each for each in defaults["thresholds"]["steps"] if value >= (each["value"] or 0)]
    colour, shown = _STATES[steps[-1]["color"]], figure(value, defaults["unit"])
    rows = [
        f'<text x="{x + width / 2:.1f}" y="{y + height - 26:.1f}" font-size="26" fill="{colour}"'
        f' text-anchor="middle" style="fill: {colour}">{escape(shown)}</text>'
    ]
    if panel["type"] == "gauge":
        bar = f'x="{x + 14}" y="{y + height - 16}" height="6" rx="3"'
        rows.append(f'<rect {bar} width="{width - 28}" class="rest"/>')
        rows.append(f'<rect {bar} width="{(width - 28) * min(1, value):.1f}" fill="{colour}"/>')
    return rows


def plot(
    panel: dict[str, Any], lines: Series, place: tuple[float, float, float, float], seconds: float
) -> list[str]:
    """Draw a panel of lines over time."""
    x, y, width, height = place
    unit = panel["fieldConfig"]["defaults"]["unit"]
    most = max([v for _, points in lines for _, v in points], default=0) or 1.0
    left, top = x + 76, y + _HEAD + 8
    right, bottom = x + width - 12, y + height - 30
    rows = []
    for share in (0.0, 0.5, 1.0):
        level = bottom - (bottom - top) * share
        rows.append(f'<path class="line" d="M{left} {level:.1f}H{right}"/>')
        rows.append(
            text(left - 6, level + 4, figure(most * share, unit), kind="quiet", end=True, size=11)
        )
    at, named = left, _fixed_colours(panel)
    for number, (name, points) in enumerate(lines):
        colour = _LINES[named.get(name, number % len(_LINES))]
        spots = " ".join(
            f"{left + (right - left) * when / seconds:.1f},{bottom - (bottom - top) * v / most:.1f}"
            for when, v in points
        )
        rows.append(f'<polyline points="{spots}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if at + 14 + 6.4 * len(name) < right:
            rows.append(
                f'<rect x="{at:.1f}" y="{y + height - 18}" width="10" height="4" fill="{colour}"/>'
            )
            rows.append(text(at + 14, y + height - 11, name or "value", kind="quiet", size=11))
            at += 28 + 6.4 * len(name or "value")
    return rows


def _fixed_colours(panel: dict[str, Any]) -> dict[str, int]:
    """Return which line has which colour, where the dashboard says so."""
    found = dict[str, int]()
    for each in panel["fieldConfig"].get("overrides", ()):
        for said in each["properties"]:
            if said["id"] == "color":
                found[each["matcher"]["options"]] = _NAMED[said["value"]["fixedColor"]]
    return found


def table(panel: dict[str, Any], prometheus: Prometheus, place: tuple[float, ...]) -> list[str]:
    """Draw a panel of one line for each node."""
    x, y, width, _ = place
    heads, nodes = ["node"], dict[str, list[str]]()
    for target in panel["targets"]:
        found = prometheus.ask("query", query=meant(target["expr"]))
        named = "version" in found[0]["metric"] if found else False
        heads.append("phosd" if named else _subject(target["expr"]))
        for each in found:
            labels = each["metric"]
            size = "disk" in target["expr"]
            said = (
                labels["version"]
                if named
                else figure(float(each["value"][1]), "bytes" if size else "")
            )
            nodes.setdefault(labels["instance"], [labels["instance"]]).append(said)
    step = (width - 24) / (len(heads) + 0.5)
    left = [x + 12, *(x + 12 + step * (n + 1.5) for n in range(len(heads) - 1))]
    rows = [
        text(at, y + _HEAD + 20, head, kind="quiet", size=11)
        for at, head in zip(left, heads, strict=True)
    ]
    for number, cells in enumerate(nodes.values()):
        level = y + _HEAD + 46 + 24 * number
        rows += [text(at, level, cell, size=12) for at, cell in zip(left, cells, strict=False)]
    return rows


def _subject(expression: str) -> str:
    """Return what a column of the table of nodes counts."""
    words = {"nobody": "not restarted", "late|": "need somebody", "disk": "disk free"}
    return next((said for part, said in words.items() if part in expression), "programs")


def drawn(prometheus: Prometheus, seconds: float) -> str:
    """Return the picture."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    rows = begun("phosd's dashboard", 24 * _COLUMN + 2 * _GAP, bottom * _ROW + 2 * _GAP)
    rows.append("<style>.panel { fill: none; stroke-width: 1 } .rest { fill: #d1d9e0 }</style>")
    for panel in panels:
        grid = panel["gridPos"]
        place = (
            _GAP + grid["x"] * _COLUMN + _GAP / 2,
            _GAP + grid["y"] * _ROW + _GAP / 2,
            grid["w"] * _COLUMN - _GAP,
            grid["h"] * _ROW - _GAP,
        )
        x, y, width, height = place
        rows.append(
            f'<rect class="panel line" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
        )
        rows.append(text(x + 8, y + 18, panel["title"], size=11 if grid["w"] <= 4 else 12))
        match panel["type"]:
            case "stat" | "gauge":
                rows += single(panel, prometheus.value(panel["targets"][0]["expr"]), place)
            case "table":
                rows += table(panel, prometheus, place)
            case _:
                rows += plot(panel, prometheus.lines(panel, seconds), place, seconds)
    return "\n".join([*rows, "</svg>"]) + "\n"


@asynccontextmanager
async def _training(place: Path, name: str) -> AsyncIterator[None]:
    env = python_environment() | {
        "PHOS_RUNTIME_DIR": str(place / "run"),
        "XDG_STATE_HOME": str(place / "home"),
    }
    words = ["run", "--name", name, "--", sys.executable, "-m", "phosd.demo.train"]
    async with stage.running([sys.executable, "-m", "phosd.cli.main", *words], place / name, env):
        yield


@asynccontextmanager
async def _node(place: Path) -> AsyncIterator[AsyncClient]:
    """A phosd that serves metrics, three trainings, and a Prometheus."""
    place.joinpath("phosd.toml").write_text(
        f'metrics = "127.0.0.1:{_PORTS[0]}"\nrescan_seconds = 1.0\n'
    )
    scraped = {"job_name": "phosd", "static_configs": [{"targets": [f"127.0.0.1:{_PORTS[0]}"]}]}
    watched = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}
    place.joinpath("prometheus.yml").write_text(json.dumps(watched))
    watch = [
        str(PROMETHEUS),
        f"--config.file={place / 'prometheus.yml'}",
        f"--storage.tsdb.path={place / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{_PORTS[1]}",
    ]
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(stage.private_bus(place))
        config = f"--config={place / 'phosd.toml'}"
        client = await stack.enter_async_context(stage.daemon(place, address, [config]))
        await stack.enter_async_context(
            stage.running(watch, place / "prometheus", dict(os.environ))
        )
        for name in ("bert", "llama-ft", "gpt"):
            await stack.enter_async_context(_training(place, name))
        yield client


async def _pids(client: AsyncClient, names: Sequence[str]) -> list[int]:
    """Wait until the trainings compute, and return their pids."""
    for _ in range(600):
        found = {each.name: each.pid for each in await client.processes() if each.device_bytes}
        if {*names} <= found.keys():
            return [found[name] for name in names]
        await asyncio.sleep(0.1)
    raise stage.DemoError(f"not all of {', '.join(names)} use the GPU")


async def _live(client: AsyncClient, seconds: float) -> None:
    """Let a day of a node go by in so many seconds."""
    bert, llama, gpt = await _pids(client, ("bert", "llama-ft", "gpt"))
    part = seconds / 6
    await (await client.checkpoint(bert, every=part / 3)).wait()
    await asyncio.sleep(part)
    await (await client.checkpoint(llama, every=part / 2)).wait()
    await asyncio.sleep(part)
    await (await client.suspend(llama, queue=True)).wait()
    await asyncio.sleep(part)
    await (await client.resume(llama, queue=True)).wait()
    await (await client.checkpoint(gpt, queue=True)).wait()
    await asyncio.sleep(part)
    os.kill(llama, signal.SIGSTOP)  # nobody saves it now
    await asyncio.sleep(2 * part)
    os.kill(llama, signal.SIGCONT)


async def _picture(seconds: float) -> str:
    began = time.monotonic()
    async with stage.folder() as place, _node(place) as client:
        await _live(client, seconds)
        return await asyncio.to_thread(drawn, Prometheus(), time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the dashboard with a node's figures.")
    parser.add_argument("--seconds", type=float, default=150, help="how long the node is watched")
    try:
        picture = asyncio.run(_picture(parser.parse_args().seconds))
    except stage.DemoError as error:
        sys.exit(f"make_dashboard: {error}")
    path = FOLDER / "dashboard.svg"
    path.write_text(picture)
    print(path)


if __name__ == "__main__":
    main()
