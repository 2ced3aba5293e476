"""Tables and a plot from the JSON lines of ``bench.checkpoint``.

    python -m bench.report docs/benchmarks/h200.jsonl --plot docs/benchmarks/stop.svg

Prints the tables in Markdown. Each row of a table is one line of the file, in its order.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

STOP = ("quiesce", "digest", "drain", "park", "control", "cpu", "unpark")
"""Phases of a checkpoint in which the program stands still."""
RESTORE = ("admission", "load", "cpu", "control", "map", "verify")
COLOURS = ("#b0b0b0", "#8c6bb1", "#2b8cbe", "#a6bddb", "#f16913", "#d94801", "#fdae6b")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path, help="write the stops as an SVG")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.results.read_text().splitlines()]
    rows = [line for line in lines if "checkpoint_phases_s" in line]
    print("The stop, in seconds:\n")
    print(table(rows, "checkpoint_phases_s", STOP, "stop_s"))
    print("\nThe restore, in seconds:\n")
    print(table(rows, "restore_phases_s", RESTORE, "restore_s"))
    if options.plot:
        options.plot.write_text(plot(rows))


def name(row: Row) -> str:
    """What a row is about."""
    place = "disk" if row["state"] == "/tmp" else "memory"
    pages = ", huge pages" if row["transparent_hugepages"] == "always" else ""
    through = ", D-Bus" if row["through"] == "D-Bus" else ""
    return f"{row['case']}, {row['mode']}, {place}{through}{pages}"


def table(rows: Sequence[Row], key: str, phases: Sequence[str], total: str) -> str:
    """A Markdown table: a row a case, a column a phase; empty where there is no such phase."""
    lines = [
        "| case | " + " | ".join(phases) + " | all |",
        "| --- |" + " ---: |" * (len(phases) + 1),
    ]
    for row in rows:
        cells = [f"{row[key][phase]:.3f}" if phase in row[key] else "" for phase in phases]
        lines.append(f"| {name(row)} | " + " | ".join(cells) + f" | {row[total]:.2f} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> str:
    """The stops as stacked bars, on one scale."""
    width, left, bar, gap, top = 900, 300, 22, 14, 34
    scale = (width - left - 70) / max(row["stop_s"] for row in rows)
    height = top + len(rows) * (bar + gap) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x = 10.0
    for phase, colour in zip(STOP, COLOURS, strict=True):
        out.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 16}" y="21">{phase}</text>')
        x += 90
    for number, row in enumerate(rows):
        y = top + number * (bar + gap)
        out.append(
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(name(row))}</text>'
        )
        x = float(left)
        for phase, colour in zip(STOP, COLOURS, strict=True):
            length = row["checkpoint_phases_s"].get(phase, 0.0) * scale
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{bar}" fill="{colour}"/>'
            )
            x += length
        out.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{row["stop_s"]:.2f} s</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    main()
