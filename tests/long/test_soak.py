"""Hundreds of short jobs: nothing grows but the history, and that as it should.

``python -m bench.soak`` is the long version of this; docs/benchmarks/faults.md has what it found.
"""

from pathlib import Path

import pytest

from bench.soak import KEPT, soak

JOBS = 400
WAL = 5 << 20
"""What SQLite's log takes before it is brought into the file, at most, with some room."""
ROOM = {
    "threads": 2,
    "descriptors": 2,
    "children_descriptors": 2,
    "children": 0,
    "resident": 16 << 20,
    "children_resident": 32 << 20,
}
"""How much more there may be of each figure at the end. Left behind by each checkpoint, one would
be 16 by then.
"""


@pytest.mark.rotated(of=4)
@pytest.mark.timeout(600)
def test_hundreds_of_jobs_leave_nothing_behind(tmp_path: Path) -> None:
    result = soak(tmp_path, JOBS, checkpoint_every=10)
    assert result.failures == []
    assert sum(result.jobs.values()) == JOBS
    assert result.jobs["Checkpoint"] >= JOBS // 10
    # What is kept of jobs, caches and pools of threads fill up in the first part.
    early, late = result.samples[4], result.samples[-1]
    assert late.jobs - early.jobs >= JOBS // 2
    # What comes after a job may still be at work when a sample is taken, but not in all of them.
    for name, room in ROOM.items():
        before = max(getattr(sample, name) for sample in result.samples[2:5])
        after = min(getattr(sample, name) for sample in result.samples[-3:])
        assert after <= before + room, name
    assert min(sample.images for sample in result.samples[-3:]) <= KEPT + 1
    rows = late.history_rows - early.history_rows
    assert rows < 20 * (late.jobs - early.jobs)
    assert late.history < WAL + 1000 * late.history_rows
    assert len(result.list_seconds) > 10
    assert result.list_percentile(0.99) < 5.0
