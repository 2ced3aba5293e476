"""Format the JSON lines of ``bench.checkpoint``, ``bench.series`` or ``bench.restoring`` as tables
and a plot.

    python -m bench.report docs/benchmarks/h200.jsonl --plot docs/benchmarks/stop.svg
    cd docs/benchmarks; python -m bench.report h200-concurrent.jsonl --plot concurrent.svg
    python -m bench.report h100-restore.jsonl --build "stop and driver" --plot restore.svg

Prints the tables in Markdown. Each row of a table is one line of the file, in its order. The plot
has the seconds of the last table.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

STOP = ("quiesce", "digest", "drain", "park", "control", "cpu", "unpark")
"""Phases of a checkpoint during which the program is stopped."""
RESTORE = ("admission", "load", "cpu", "control", "map", "verify")
COLOURS = {
    "quiesce": "#b0b0b0",
    "digest": "#8c6bb1",
    "drain": "#2b8cbe",
    "park": "#a6bddb",
    "control": "#f16913",
    "cpu": "#d94801",
    "unpark": "#fdae6b",
    "admission": "#b0b0b0",
    "load": "#2b8cbe",
    "map": "#fdae6b",
    "verify": "#8c6bb1",
}

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--build", help="leave out the lines of other builds")
    parser.add_argument("--plot", type=Path, help="write the seconds of each row as an SVG")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.results.read_text().splitlines()]
    if options.build is not None:
        lines = [line for line in lines if line.get("build") == options.build]
    drawn = report(lines)
    if options.plot:
        options.plot.write_text(drawn)


def report(lines: Sequence[Row]) -> str:
    """Print the tables of ``lines``, and return their plot."""
    series = [line for line in lines if "checkpoints" in line]
    if series:
        print(costs(series))
        print("\nThe time stolen, and the hook's looks:\n")
        print(slowdowns(series))
        if pairs := with_and_without(series):
            print("\nWithout and with analysis of what is launched:\n")
            print(beside(pairs))
        print("\nThe median stop, in seconds:\n")
        rows = [medians(line) for line in series]
        print(table(rows, "checkpoint_phases_s", STOP, "stop_s"))
    elif restores := [restored(line) for line in lines if "restores" in line]:
        print("The median restore, in seconds:\n")
        print(table(restores, "restore_phases_s", RESTORE, "restore_s"))
        return plot(restores, "restore_phases_s", RESTORE, "restore_s")
    else:
        rows = [line for line in lines if "checkpoint_phases_s" in line]
        print("The stop, in seconds:\n")
        print(table(rows, "checkpoint_phases_s", STOP, "stop_s"))
        print("\nThe restore, in seconds:\n")
        print(table(rows, "restore_phases_s", RESTORE, "restore_s"))
    return plot(rows, "checkpoint_phases_s", STOP, "stop_s")


def medians(line: Row) -> Row:
    """Return a series as one row: the median of its stops, and of each phase inside them."""
    done = [one for one in line["checkpoints"] if "stop_s" in one]
    stopped = [one["phases_s"] | {"drain": one["drain_phase_s"] or 0.0} for one in done]
    phases = {
        phase: statistics.median(one[phase] for one in stopped)
        for phase in STOP
        if all(phase in one for one in stopped)
    }
    stop = statistics.median(one["stop_s"] for one in done)
    return line | {"checkpoint_phases_s": phases, "stop_s": stop}


def restored(line: Row) -> Row:
    """Return the restores of one program as one row: their median, and that of each phase."""
    done = [one["phases_s"] for one in line["restores"]]
    phases = {
        phase: statistics.median(one[phase] for one in done)
        for phase in RESTORE
        if all(phase in one for one in done)
    }
    return line | {"restore_phases_s": phases, "restore_s": line["median_s"]}


def costs(series: Sequence[Row]) -> str:
    """Return a Markdown table of what the checkpoints of each series cost its program.

    ``lost`` is the mean of stop and stolen time; the drain's rate counts the bytes that were saved.
    """
    lines = [
        "| series | device (GB) | count | stop: median, max (s) | stolen: median, max (s)"
        " | lost (s) | saved (GB) | drain (GB/s) | needless shadows | wrong guesses |",
        "| --- |" + " ---: |" * 9,
    ]
    for line in series:
        done = [one for one in line["checkpoints"] if "stop_s" in one]
        stops, stolen = [one["stop_s"] for one in done], _stolen(done)
        cells = [
            name(line),
            f"{line['device_bytes'] / 1e9:.1f}" if line["device_bytes"] else "",
            f"{len(done)}",
            f"{statistics.median(stops):.2f}, {max(stops):.2f}",
            f"{statistics.median(stolen):.2f}, {max(stolen):.2f}",
            f"{statistics.mean(map(sum, zip(stops, stolen, strict=True))):.2f}",
            f"{statistics.median(one['new_bytes'] for one in done) / 1e9:.2f}",
            *_drained(done),
            f"{sum(one['wrong_guesses'] for one in done)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def slowdowns(series: Sequence[Row]) -> str:
    """Return a Markdown table of when time was stolen, and of the cost of a submission during a
    drain.

    Time is stolen in the iterations before the stop, in those that overlap stop or drain (less the
    stop), and in those after. A drain that is shorter than an iteration slows nothing down that
    could be measured.
    """
    lines = [
        "| series | drain (s) | stolen before, in and after it (s) | slowdown while draining"
        " | iterations wholly in it: count, slower by | threads waited (s)"
        " | a look: mean, median, p99.9 (µs) |",
        "| --- |" + " ---: |" * 6,
    ]
    for line in series:
        done = [one for one in line["checkpoints"] if "draining_s" in one]
        if not done or not all("drain_seconds" in one["details"] for one in done):
            continue
        usual = statistics.median(one["usual_iteration_s"] for one in done)
        parts = {
            part: [_stolen_in(one, part, usual) for one in done]
            for part in ("before", "drain", "after")
        }
        draining = [one["draining_s"] for one in done]
        cells = [
            name(line),
            f"{statistics.median(draining):.2f}",
            ", ".join(f"{statistics.median(part):.3f}" for part in parts.values()),
            f"{_slower(done):.1%}" if statistics.median(draining) > usual else "",
            _whole(done),
            *_looks([one["details"] for one in done]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _whole(done: Sequence[Row]) -> str:
    """Return the number of iterations wholly inside the drain, and their median slowdown."""
    slower = [s / one["usual_iteration_s"] - 1 for one in done for s in one.get("whole_s", ())]
    return f"{len(slower)}, {statistics.median(slower):.1%}" if slower else ""


def _looks(details: Sequence[Row]) -> tuple[str, str]:
    """Return how long threads waited, and the cost of a look; empty without copy-on-write."""
    if not all("look_median_seconds" in one for one in details):
        return "", ""
    waited = statistics.median(one["waited_seconds"] for one in details)
    submissions = sum(one["submissions"] for one in details)
    if not submissions:  # a snapshot held everything when the gate opened
        return f"{waited:.3f}", ""
    mean = sum(one["looked_seconds"] for one in details) / submissions * 1e6
    median = statistics.median(one["look_median_seconds"] for one in details) * 1e6
    told = f"{mean:.2f}, {median:.2f}"
    slowest = [one["look_p999_seconds"] for one in details if "look_p999_seconds" in one]
    if slowest:  # an older phosd has not recorded it
        told += f", {max(slowest) * 1e6:.2f}"
    return f"{waited:.3f}", told


def with_and_without(series: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return the series whose program's kernels were analysed, each behind the same without."""
    without = {name(line): line for line in series if not line.get("analysed")}
    return [
        (without[plain], line)
        for line in series
        if line.get("analysed") and (plain := name(line | {"analysed": None})) in without
    ]


def beside(pairs: Sequence[tuple[Row, Row]]) -> str:
    """Return a Markdown table with what is measured without analysis and with it in each cell.

    ``submissions`` is how many launches were predicted, copies and sets included, and checked by
    digests afterwards.
    """
    columns: tuple[tuple[str, Callable[[Sequence[Row]], str]], ...] = (
        ("checkpoints", lambda done: f"{len(done)}"),
        ("needless shadows", lambda done: _drained(done)[1]),
        ("slowdown while draining", lambda done: f"{_slower(done):.1%}"),
        ("wholly in it: count, slower by", _whole),
        ("a look: median, p99, p99.9, worst (µs)", _slow_looks),
        ("submissions", lambda done: f"{_sum(done, 'submissions')}"),
        ("wrong guesses", lambda done: f"{sum(one['wrong_guesses'] for one in done)}"),
    )
    heads = [f"{head}: without, with" for head, _ in columns]
    lines = [
        "| " + " | ".join(["series", "kernels: analysed, with unknowns", *heads]) + " |",
        "| --- |" + " ---: |" * (1 + len(columns)),
    ]
    for pair in pairs:
        done = [[one for one in line["checkpoints"] if "stop_s" in one] for line in pair]
        found = pair[1]["analysed"]
        cells = [f"{found['kernels']}, {found['unknown']}"]
        cells += ["; ".join(map(tell, done)) for _, tell in columns]
        lines.append("| " + " | ".join([name(pair[0]), *cells]) + " |")
    return "\n".join(lines)


def _slow_looks(done: Sequence[Row]) -> str:
    """Return how long looks took, in microseconds: the most of all checkpoints, but the median of
    their medians.
    """
    found = []
    for key, of in (("median", statistics.median), ("p99", max), ("p999", max), ("worst", max)):
        took = [one["details"].get(f"look_{key}_seconds") for one in done]
        told = [each * 1e6 for each in took if each is not None]
        found.append(f"{of(told):.2f}" if told else "")  # an older phosd has not recorded it
    return ", ".join(found)


def _sum(done: Sequence[Row], figure: str) -> int:
    return sum(one["details"].get(figure) or 0 for one in done)


def _stolen_in(one: Row, part: str, usual: float) -> float:
    """Return the time stolen in the iterations of a part; of the drain, less the stop."""
    stopped = one["stop_s"] if part == "drain" else 0.0
    seconds, count = float(one[part]["seconds"]), int(one[part]["count"])
    return seconds - count * usual - float(stopped)


def _slower(done: Sequence[Row]) -> float:
    """Return the median share of a drain that it stole from the program."""
    usual = statistics.median(one["usual_iteration_s"] for one in done)
    shares = (_stolen_in(one, "drain", usual) / float(one["draining_s"]) for one in done)
    return statistics.median(shares)


def _stolen(done: Sequence[Row]) -> list[float]:
    """Return the seconds stolen by each checkpoint. All are relative to the median iteration of the
    whole series, since an error of 0.1 % in it, times the iterations around a checkpoint, is as
    large as the result.
    """
    usual = statistics.median(one["usual_iteration_s"] for one in done)
    return [
        one["stolen_s"] + one["iterations_around"] * (one["usual_iteration_s"] - usual)
        for one in done
    ]


def _drained(done: Sequence[Row]) -> tuple[str, str]:
    """Return the drain's median rate, and the medians of needless shadows and of all shadows."""
    details = [one["details"] for one in done if "drain_seconds" in one["details"]]
    if not details:
        return "", ""
    rate = statistics.median(one["drain_bytes"] / one["drain_seconds"] for one in details) / 1e9
    if not all("shadowed_chunks" in one for one in details):
        return f"{rate:.1f}", ""
    needless, shadows = (
        statistics.median(one[key] or 0 for one in details)
        for key in ("needless_shadows", "shadowed_chunks")
    )
    return f"{rate:.1f}", f"{needless:.0f} of {shadows:.0f}"


def name(row: Row) -> str:
    """Return a label for a row."""
    if "series" in row:
        place = "" if row["state"] == "/dev/shm" else ", ext4"
        limit = "" if row.get("shadow_limit") is None else ", no shadows"
        kind = ", on write" if row.get("on_write") else ""
        kind += ", incremental" if row["incremental"] else ""
        kind += ", analysed" if row.get("analysed") else ""
        program = (
            row["series"].replace(" --deterministic", "").replace("--size ", "").replace("--", "")
        )
        build = f" ({row['build']})" if "build" in row else ""
        return f"{program}, {row['mode']}{kind}{limit}{place}{build}"
    if "restores" in row:
        mode = f", {row['mode']}" if "mode" in row else ""
        place = ", disk" if row.get("memory_tier") == "0" else ", memory"
        within = ", pid namespace" if row["pidns"] else ""
        program = " ".join(row["program"]).replace("--size ", "").replace("--", "")
        return f"{program}{mode}{place}{within}"
    place = "disk" if row["state"] == "/tmp" else "memory"
    pages = ", huge pages" if row["transparent_hugepages"] == "always" else ""
    through = ", D-Bus" if row["through"] == "D-Bus" else ""
    return f"{row['case']}, {row['mode']}, {place}{through}{pages}"


def table(rows: Sequence[Row], key: str, phases: Sequence[str], total: str) -> str:
    """Return a Markdown table with a row per case and a column per phase; missing phases are
    empty.
    """
    lines = [
        "| case | " + " | ".join(phases) + " | all |",
        "| --- |" + " ---: |" * (len(phases) + 1),
    ]
    for row in rows:
        cells = [f"{row[key][phase]:.3f}" if phase in row[key] else "" for phase in phases]
        lines.append(f"| {name(row)} | " + " | ".join(cells) + f" | {row[total]:.2f} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], key: str, phases: Sequence[str], total: str) -> str:
    """Draw the phases of each row as a bar, all on one scale, as an SVG."""
    drawn = [(name(row), row[key], row[total]) for row in rows]
    return bars(drawn, phases)


def bars(rows: Sequence[tuple[str, dict[str, float], float]], phases: Sequence[str]) -> str:
    """Draw rows of a label, the seconds of some ``phases`` and the seconds of all, as an SVG."""
    bar, gap, top = 22, 14, 34
    left = max(300, 7 * max(len(label) for label, _, _ in rows))  # pixels for the longest label
    width = left + 600
    scale = (width - left - 70) / max(total for _, _, total in rows)
    height = top + len(rows) * (bar + gap) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x = 10.0
    for phase in phases:
        out.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS[phase]}"/>')
        out.append(f'<text x="{x + 16}" y="21">{phase}</text>')
        x += 90
    for number, (label, seconds, total) in enumerate(rows):
        y = top + number * (bar + gap)
        out.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        x = float(left)
        for phase in phases:
            length = seconds.get(phase, 0.0) * scale
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{bar}"'
                f' fill="{COLOURS[phase]}"/>'
            )
            x += length
        out.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{total:.2f} s</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    main()
