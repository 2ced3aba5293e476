"""Draw docs/pictures/*.svg: who does what in each phase of a checkpoint and of a restore, and the
stop against device memory, from a benchmark's results.

The timelines are not to scale: their widths fit the texts. The pictures name no font that a system
may lack, have a background of their own, and take dark colours where the system does.
"""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "pictures"
MEASURED = DOCS / "benchmarks/h200-snapshot.jsonl"
LEFT, TOP, LANE, GAP = 112, 44, 42, 6
STYLE = """\
svg { font: 13px system-ui, sans-serif; }
.card { fill: #ffffff; } text { fill: #1f2328; } .quiet { fill: #59636e; }
.line { stroke: #d1d9e0; } .stop { fill: #fff1e5; }
.runs { fill: #aceebb; } .stands { fill: #ffb77c; } .works { fill: #b6e3ff; }
.phosd { fill: #1a7f37; } .driver { fill: #bc4c00; }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; } text { fill: #e6edf3; } .quiet { fill: #9198a1; }
.line { stroke: #3d444d; } .stop { fill: #2d1f12; }
.runs { fill: #1a5c2c; } .stands { fill: #8a4113; } .works { fill: #0c4a7a; }
.phosd { fill: #3fb950; } .driver { fill: #f0883e; }
}"""


@dataclass(frozen=True)
class Bar:
    """What ``lane`` does from one phase to another, which it includes."""

    lane: str
    first: str
    last: str
    text: str
    kind: str = "works"


@dataclass(frozen=True)
class Timeline:
    """A picture: its phases with their widths, and what happens in them."""

    title: str
    phases: dict[str, int]
    bars: tuple[Bar, ...]
    stop: tuple[str, str] | None = None
    """The first and the last phase of the stop, which is marked in all lanes."""


CHECKPOINT = Timeline(
    "A checkpoint in mode concurrent, with a snapshot",
    {"prepare": 118, "quiesce": 96, "park": 112, "control": 104, "cpu": 146, "unpark": 208}
    | {"drain": 132, "publish": 104},
    (
        Bar("Program", "prepare", "prepare", "computes", "runs"),
        Bar("Program", "quiesce", "unpark", "stands still: the stop", "stands"),
        Bar("Program", "drain", "publish", "computes", "runs"),
        Bar("Hook", "quiesce", "quiesce", "closes\nthe gate"),
        Bar("Hook", "park", "park", "lets go of\ndevice memory"),
        Bar("Hook", "unpark", "unpark", "maps device memory again,\nopens the gate"),
        Bar("NVIDIA driver", "control", "control", "saves\ncontexts"),
        Bar("NVIDIA driver", "unpark", "unpark", "restores contexts first"),
        Bar("CRIU", "prepare", "prepare", "starts,\nand waits"),
        Bar("CRIU", "cpu", "cpu", "saves processes,\nthreads, files"),
        Bar("Data mover", "prepare", "prepare", "makes room"),
        Bar("Data mover", "cpu", "cpu", "copies device\nmemory on the GPU"),
        Bar("Data mover", "drain", "drain", "writes the copy\ninto the image"),
        Bar("phosd", "prepare", "prepare", "checks what\ncan be refused"),
        Bar("phosd", "publish", "publish", "writes the\nmanifest"),
    ),
    stop=("quiesce", "unpark"),
)
RESTORE = Timeline(
    "A restore",
    {
        "admission": 160,
        "load": 180,
        "cpu": 150,
        "control": 130,
        "map": 110,
        "verify": 110,
        "open": 110,
    },
    (
        Bar("Program", "cpu", "verify", "is there, and stands still", "stands"),
        Bar("Program", "open", "open", "computes", "runs"),
        Bar("phosd", "admission", "admission", "checks driver, CRIU,\nGPUs, pids, files"),
        Bar("phosd", "load", "load", "checks CRIU's files"),
        Bar("phosd", "cpu", "cpu", "puts large\nhost memory back"),
        Bar("phosd", "verify", "verify", "looks at\nall of it"),
        Bar("Data mover", "load", "load", "loads device memory;\nthe GPU checks digests"),
        Bar("CRIU", "load", "cpu", "makes the processes; none of them runs yet"),
        Bar("NVIDIA driver", "control", "control", "restores contexts"),
        Bar("Hook", "open", "open", "opens\nthe gate"),
        Bar("Hook", "map", "map", "maps device\nmemory"),
    ),
)


def places(phases: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return where each phase begins and ends."""
    found, left = {}, LEFT
    for phase, width in phases.items():
        found[phase] = (left, left + width)
        left += width
    return found


def words(text: str, x: float, middle: float) -> str:
    """Return lines of text around a point."""
    lines = text.split("\n")
    top = middle + 4.5 - 8 * (len(lines) - 1)
    return "".join(
        f'<text x="{x:g}" y="{top + 16 * number:g}" text-anchor="middle">{escape(line)}</text>\n'
        for number, line in enumerate(lines)
    )


def begun(title: str, width: int, height: int) -> list[str]:
    """Return the first lines of a picture."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>",
        f'<rect class="card" width="{width}" height="{height}" rx="6"/>',
    ]


def drawn(timeline: Timeline) -> str:
    """Return the picture."""
    place = places(timeline.phases)
    lanes = list(dict.fromkeys(bar.lane for bar in timeline.bars))
    width = LEFT + sum(timeline.phases.values()) + 10
    bottom = TOP + LANE * len(lanes)
    rows = begun(timeline.title, width, bottom + 10)
    if timeline.stop is not None:
        start, end = place[timeline.stop[0]][0], place[timeline.stop[1]][1]
        rows.append(
            f'<rect class="stop" x="{start}" y="8" width="{end - start}" height="{bottom - 6}"/>'
        )
    for phase, (start, end) in place.items():
        middle = (start + end) / 2
        rows.append(
            f'<text class="quiet" x="{middle:g}" y="28" text-anchor="middle">{phase}</text>'
            f'<path class="line" d="M{start} 8V{bottom + 2}"/>'
        )
    for number, lane in enumerate(lanes):
        rows.append(f'<text x="10" y="{TOP + LANE * number + 23}">{escape(lane)}</text>')
    for bar in timeline.bars:
        start, end = place[bar.first][0] + 3, place[bar.last][1] - 3
        top = TOP + LANE * lanes.index(bar.lane) + GAP / 2
        rows.append(
            f'<rect class="{bar.kind}" x="{start}" y="{top:g}" width="{end - start}"'
            f' height="{LANE - GAP}" rx="4"/>\n'
            + words(bar.text, (start + end) / 2, top + (LANE - GAP) / 2).rstrip()
        )
    return "\n".join([*rows, "</svg>"]) + "\n"


def measured() -> list[tuple[str, float, float]]:
    """Return mode, device memory (GB) and the median stop (s) of each series on an H200."""
    series = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    memory = {each["series"]: each["device_bytes"] / 1e9 for each in series if each["device_bytes"]}
    return [(each["mode"], memory[each["series"]], each["stop_median_s"]) for each in series]


def plotted() -> str:
    """Return the plot of stops against device memory: 5 pixels a GB, 9 a second."""
    left, bottom = 60, 310
    rows = begun("The stop against device memory", 800, 360)
    for gigabytes in range(0, 141, 20):
        x = left + 5 * gigabytes
        rows.append(
            f'<path class="line" d="M{x} 30V{bottom}"/>'
            f'<text class="quiet" x="{x}" y="330" text-anchor="middle">{gigabytes}</text>'
        )
    for seconds in range(0, 31, 10):
        y = bottom - 9 * seconds
        rows.append(
            f'<path class="line" d="M{left} {y}H760"/>'
            f'<text class="quiet" x="52" y="{y + 4}" text-anchor="end">{seconds}</text>'
        )
    rows += [
        '<text class="quiet" x="410" y="350" text-anchor="middle">device memory (GB)</text>',
        '<text class="quiet" x="10" y="22">the program stands still (s), medians on an H200</text>',
        '<text x="285" y="56">the driver\'s checkpoint and CRIU</text>',
        '<text x="470" y="288">phosd, mode concurrent</text>',
    ]
    for mode, gigabytes_used, stop in measured():
        kind = "driver" if mode == "driver" else "phosd"
        place = f'cx="{left + 5 * gigabytes_used:.1f}" cy="{bottom - 9 * stop:.1f}"'
        rows.append(f'<circle class="{kind}" {place} r="5"/>')
    return "\n".join([*rows, "</svg>"]) + "\n"


def files() -> dict[Path, str]:
    """Return the pictures, by their paths."""
    return {
        FOLDER / "checkpoint.svg": drawn(CHECKPOINT),
        FOLDER / "restore.svg": drawn(RESTORE),
        FOLDER / "stop.svg": plotted(),
    }
