"""Format the JSON lines of ``bench.moving`` as tables, and plot the stops of migrations.

    python -m bench.moved docs/benchmarks/h200-moving.jsonl --plot docs/benchmarks/moving.svg

Prints Markdown, with one row per line of the file.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import bars

Row = dict[str, Any]
STOP = ("quiesce", "park", "control", "unpark")
BACK = ("admission", "load", "control", "map")
"""Phases of a resume until the program runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path, help="write the stops of migrations as an SVG")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    for operation, show in (("migrate", migrations), ("suspend", suspensions), ("swap", swaps)):
        print(f"\n{operation}:\n\n{show([row for row in rows if row['operation'] == operation])}")
    if options.plot:
        options.plot.write_text(plot([row for row in rows if row["operation"] == "migrate"]))


def plot(rows: Sequence[Row]) -> str:
    """Draw the median stop of the migrations of each row, by phase, as an SVG."""
    drawn = []
    for row in rows:
        phases = [one["phases_s"] for one in row["results"]]
        taken = {name: median(one.get(name, 0.0) for one in phases) for name in STOP}
        drawn.append((_name(row), taken, row["stop_median_s"]))
    return bars(drawn, STOP)


def migrations(rows: Sequence[Row]) -> str:
    """Return a table of the cost of migrations; rates are of the first pass, which copies
    everything.
    """
    titles = ["program", "device (GB)", "moves", "stop: median, max (s)", *STOP]
    titles += ["first pass (GB/s)", "passes", "left for the stop (GB)"]
    titles += ["iteration: usual, longest (s)", "stolen (s)"]
    return table(titles, (_migration(row, row["results"]) for row in rows))


def _migration(row: Row, done: Sequence[Row]) -> list[str]:
    rates = [one["rates_gb_s"][0][2] for one in done if one["rates_gb_s"]]
    passes = [one["details"]["passes"] for one in done if "passes" in one["details"]]
    left = [one["details"]["bytes_left"] / 1e9 for one in done if "bytes_left" in one["details"]]
    usual = median(one["usual_iteration_s"] for one in done)
    return [
        _name(row),
        f"{row['device_bytes'] / 1e9:.1f}" if row["device_bytes"] else "",
        f"{len(done)}",
        f"{row['stop_median_s']:.2f}, {row['stop_max_s']:.2f}",
        *_phases(STOP, [one["phases_s"] for one in done]),
        f"{median(rates):.0f}" if rates else "",
        f"{median(passes):.0f}" if passes else "",
        f"{median(left):.1f}" if left else "",
        f"{usual:.3f}, {max(one['longest_s'] for one in done):.3f}",
        f"{median(one['stolen_s'] for one in done):.3f}",
    ]


def suspensions(rows: Sequence[Row]) -> str:
    """Return a table of the seconds of suspend and resume; of a resume, until the program runs."""
    titles = ["program", "where", "device (GB)", "times", "suspend: all, prepare, save (s)"]
    titles += ["save (GB/s)", "resume: until it runs, load (s)", "load (GB/s)"]
    return table(titles, (_suspension(row) for row in rows))


def _suspension(row: Row) -> list[str]:
    off = [one["suspend"] for one in row["results"]]
    on = [one["resume"] for one in row["results"]]

    def phase(which: Sequence[Row], name: str) -> float:
        return float(median(one["phases_s"][name] for one in which))

    until = median(sum(one["phases_s"][name] for name in BACK) for one in on)
    return [
        _name(row),
        row["where"],
        f"{row['device_bytes'] / 1e9:.1f}",
        f"{len(off)}",
        f"{median(one['seconds'] for one in off):.2f}, {phase(off, 'prepare'):.2f},"
        f" {phase(off, 'save'):.2f}",
        f"{median(_rate(one) for one in off):.0f}",
        f"{until:.2f}, {phase(on, 'load'):.2f}",
        f"{median(_rate(one) for one in on):.0f}",
    ]


def swaps(rows: Sequence[Row]) -> str:
    """Return a table of swaps, in which one program leaves the GPU and another takes its place."""
    titles = ["program", "device (GB)", "swaps", "seconds: median, max", "save (s)", "load (s)"]

    def one(row: Row) -> list[str]:
        done = row["results"]
        seconds = [each["seconds"] for each in done]
        return [
            _name(row),
            f"{row['device_bytes'] / 1e9:.1f}",
            f"{len(done)}",
            f"{median(seconds):.2f}, {max(seconds):.2f}",
            f"{median(each['phases_s']['save'] for each in done):.2f}",
            f"{median(each['phases_s']['load'] for each in done):.2f}",
        ]

    return table(titles, map(one, rows))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned figures."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _phases(names: Sequence[str], phases: Sequence[Row]) -> list[str]:
    """Return the median of each phase; empty for a phase that is not in all results."""
    return [
        f"{median(one[name] for one in phases):.3f}" if all(name in one for one in phases) else ""
        for name in names
    ]


def _rate(one: Row) -> float:
    (rate,) = [rate for name, _, rate in one["rates_gb_s"] if name in ("save", "load")]
    return float(rate)


def _name(row: Row) -> str:
    words = row["moving"].replace(" --deterministic", "").replace("--size ", "").replace("--", "")
    return f"{words}, {row['mode']}" if row["operation"] == "migrate" else str(words)


if __name__ == "__main__":
    main()
