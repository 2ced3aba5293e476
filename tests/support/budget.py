"""Compare the time that ``make test`` took with its budget, area by area.

``python -m tests.support.budget STEPS TIMES`` prints the table. STEPS has a line
``title<TAB>seconds`` for each step (``packaging/step.sh``), TIMES the seconds of each test module
(``--times`` of ``shards.py``). ``tests/budget.toml`` holds the budget. An area over its budget is
reported but is no failure: a slow machine does not make a change wrong.
"""

import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


def main() -> None:
    budget = tomllib.loads(BUDGET.read_text())
    stepped = rows(steps(Path(sys.argv[1])), budget["steps"])
    tested = rows(json.loads(Path(sys.argv[2]).read_text()), budget["tests"])
    print(table("steps, one after the other", stepped))
    print(table("Python tests, summed over shards", tested))
    total = sum(row.took for row in stepped if row.area not in ON_TOP)
    allowed = budget["total"]["cold"]
    print(f"in all {total:.0f} s of {allowed} s (warm: {budget['total']['warm']} s)")
    for row in (*stepped, *tested):
        if row.over:
            print(f"over its budget: {row.area}, by {row.took - row.allowed:.0f} s")


if __name__ == "__main__":
    main()
