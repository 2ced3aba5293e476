"""Random kernels access nothing that the analysis has not predicted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.native.analysis import oracle
from tests.native.analysis.generator import kernel
from tests.support import rotation

KERNELS = 40


def test_random_kernels(tmp_path: Path) -> None:
    """Those of one run; a run of everything has 2,000."""
    seeds = rotation.seeds("kernels", KERNELS, whole=50 * KERNELS)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for first in range(0, len(seeds), KERNELS):
        folder = tmp_path / str(first)
        folder.mkdir()
        kernels = [kernel(seed) for seed in seeds[first : first + KERNELS]]
        ptx, found = oracle.compiled(kernels)
        for seen in oracle.observed(kernels, ptx, folder):
            followed = found[seen.kernel.name]
            if isinstance(followed, str):
                counts["kernels unknown"] += 1
                continue
            verdict = oracle.compare(followed, seen)
            counts["ranges"] += verdict.ranges
            counts["others"] += verdict.origins + verdict.unknown
            wrong += [f"seed {seen.kernel.name[1:]}: {one}" for one in verdict.wrong]
    assert not wrong
    # That everything is unknown would not be wrong, either.
    assert counts["ranges"] > 0.85 * counts["others"], counts
    assert counts["kernels unknown"] < 0.05 * len(seeds), counts
