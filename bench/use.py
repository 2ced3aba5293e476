"""Measure what processes hold, to see whether it grows from one job to the next."""

import contextlib
from dataclasses import dataclass, fields
from pathlib import Path

from phosd.engine.program.tree import scan

MOST_GROWTH = {"anonymous_kib": 64 << 10, "descriptors": 8, "mappings": 64}
"""What a use may grow by in many jobs and count as flat: less than one a job, in a hundred."""


@dataclass(frozen=True)
class Use:
    """What some processes hold together: anonymous memory that is resident, open descriptors, and
    mappings.
    """

    anonymous_kib: int = 0
    descriptors: int = 0
    mappings: int = 0

    def grown(self, before: "Use") -> dict[str, int]:
        """Return what has grown by more than :data:`MOST_GROWTH`, with by how much."""
        grown = {
            each.name: getattr(self, each.name) - getattr(before, each.name)
            for each in fields(self)
        }
        return {name: much for name, much in grown.items() if much > MOST_GROWTH[name]}


def of_tree(pid: int) -> Use:
    """Return the use of a process with all that it has started."""
    kib = descriptors = mappings = 0
    for each in scan(pid).pids:
        folder = Path("/proc", str(each))
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            status = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            kib += int(status.get("RssAnon", "0 kB").split()[0])
            descriptors += sum(1 for _ in (folder / "fd").iterdir())
            mappings += (folder / "maps").read_text().count("\n")
    return Use(kib, descriptors, mappings)
