"""Compare the time that ``make test`` took with its budget, area by area.

``python -m tests.support.budget LOGS`` prints the table. In the folder LOGS, ``steps`` has a line
``title<TAB>seconds`` for each step (``packaging/step.sh``), ``times.json`` the seconds of each test
module (``--times`` of ``shards.py``), ``load`` the load averages when it all began, and ``speed``
how fast the machine is (``speed.py``).
``tests/budget.toml`` holds the budget. An area over its budget is reported. The whole has a limit,
beyond which this fails, on a machine that had been quiet for a quarter of an hour: another one does
not make a change wrong. A slow machine has so much more.
"""

import json
import os
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.speed import slowness

BUDGET = Path(__file__).parents[1] / "budget.toml"


@dataclass(frozen=True)
class Row:
    """An area with the seconds that it took, and its budget in seconds; 0 without one."""

    area: str
    took: float
    allowed: float

    @property
    def over(self) -> bool:
        return self.took > self.allowed


def rows(took: Mapping[str, float], budget: Mapping[str, float]) -> list[Row]:
    """Return a row for each area of the budget, and one for each name that is in no area."""
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in took.items():
        fitting = [area for area in budget if name == area or name.startswith(f"{area}/")]
        sums[max(fitting, key=len, default=name)] += seconds
    return [Row(area, sums[area], budget.get(area, 0)) for area in {**budget, **sums}]


def table(part: str, found: list[Row]) -> str:
    """Return the rows as text, below the name of the part."""
    lines = [f"{part:<44}{'seconds':>9}{'budget':>9}"]
    for row in found:
        mark = "  over its budget" if row.over else ""
        lines.append(f"  {row.area:<42}{row.took:>9.0f}{row.allowed:>9.0f}{mark}")
    return "\n".join(lines)


def steps(path: Path) -> dict[str, float]:
    """Return the seconds of each step by title, summed over repetitions."""
    sums: dict[str, float] = defaultdict(float)
    for line in path.read_text().splitlines():
        title, _, seconds = line.rpartition("\t")
        sums[title] += float(seconds)
    return sums


ON_TOP = ("virtual environment",)
"""Steps that are no part of the total: what they take is up to the network."""


def is_quiet(logs: Path, cores: int) -> bool:
    """Whether the times of a run that began at these load averages are its own."""
    load = logs / "load"
    return load.exists() and max(map(float, load.read_text().split())) < cores / 2 and cores >= 2


def main() -> None:
    logs = Path(sys.argv[1])
    budget = tomllib.loads(BUDGET.read_text())
    stepped = rows(steps(logs / "steps"), budget["steps"])
    tested = rows(json.loads((logs / "times.json").read_text()), budget["tests"])
    print(table("steps, one after the other", stepped))
    print(table("Python tests, summed over shards", tested))
    total = sum(row.took for row in stepped if row.area not in ON_TOP)
    limits = budget["total"]
    limit = limits["limit"] * slowness(float((logs / "speed").read_text()))
    print(f"in all {total:.0f} s of {limits['cold']} s (warm: {limits['warm']} s)")
    grown = [row for row in (*stepped, *tested) if row.over]
    for row in sorted(grown, key=lambda row: row.allowed - row.took):
        print(f"over its budget: {row.area}, by {row.took - row.allowed:.0f} s")
    if total > limit and is_quiet(logs, os.cpu_count() or 1):
        sys.exit(
            f"make test has taken {total:.0f} s, which is more than its limit of {limit:.0f} s: "
            "make what has grown cheaper, or mark it `rotated` (CONTRIBUTING.md, Tests)"
        )


if __name__ == "__main__":
    main()
