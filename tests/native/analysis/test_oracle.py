"""Random kernels access nothing that the analysis has not predicted, and leave the same memory when
they are run again, if it says so. The hook finds the same ranges, in a table.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from phosd.engine.analysis import table
from phosd.engine.analysis.reference.evaluation import Launch
from phosd.engine.analysis.reference.launch_verdict import Verdict, of_launch
from tests.native.analysis import generator, in_hook, oracle
from tests.support import rotation

KERNELS = 40
MODULE = 0x1234


def check(name: str, made: Callable[[int], generator.Kernel], folder: Path) -> Counter[str]:
    """Play kernels of one run, or many times as many in a run of everything; count verdicts."""
    seeds = rotation.seeds(name, KERNELS, whole=rotation.times(1, everything=15, soak=50) * KERNELS)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for first in range(0, len(seeds), KERNELS):
        place = folder / str(first)
        place.mkdir()
        kernels = [made(seed) for seed in seeds[first : first + KERNELS]]
        ptx, found = oracle.compiled(kernels)
        assert in_hook.take(table.encode(MODULE, 90, found.values())) == ""
        for seen in oracle.observed(kernels, ptx, place):
            counts["kernels"] += 1
            summary = found[seen.kernel.name]
            verdict = of_launch(summary, seen.launch, seen.allocated).verdict
            counts["run again"] += seen.same
            counts[verdict.value] += 1
            errors = []
            if verdict is Verdict.IDEMPOTENT and not seen.same:
                errors.append(f"{seen.kernel.name} is not idempotent")
            if summary.followed is None:
                counts["kernels unknown"] += 1
            else:
                outcome = oracle.compare(summary.followed, seen)
                counts["ranges"] += outcome.ranges
                counts["others"] += outcome.origins + outcome.unknown
                counts["loads sunk"] += outcome.sunk
                errors += outcome.wrong
                errors += in_hook.errors(MODULE, summary, seen)
                counts["idempotent in the hook"] += in_hook.is_idempotent(MODULE, seen)
                counts["exact in the hook"] += in_hook.exact(MODULE, summary, seen.launch)
            wrong += [f"{name}: {seen.kernel.name[1:]}: {error}" for error in errors]
    assert not wrong
    print(dict(counts))
    assert counts["loads sunk"] <= 0.1 * counts["kernels"], counts
    return counts


def test_random_kernels(tmp_path: Path) -> None:
    counts = check("kernels", generator.kernel, tmp_path)
    # That everything is unknown would not be wrong, either.
    assert counts["ranges"] > 0.85 * counts["others"], counts
    assert counts["kernels unknown"] < 0.05 * counts["kernels"], counts
    assert counts["exact in the hook"] > 0.15 * counts["kernels"], counts


def test_kernels_that_may_be_run_again(tmp_path: Path) -> None:
    counts = check("ordered", generator.ordered, tmp_path)
    # They are 70 in a hundred of many, sometimes no more than 56 of the 25 or so in one run.
    assert counts[Verdict.IDEMPOTENT.value] > 0.35 * counts["run again"], counts


def test_a_launch_is_remembered_by_all_of_its_many_numbers() -> None:
    """As those of a kernel that PyTorch gives a list of tensors."""
    count, together = 60, 3
    names = [f"n{i}" for i in range(count)]
    places = [
        " + ".join(f"(unsigned long long){name}" for name in names[at : at + together])
        for at in range(0, count, together)
    ]
    source = (
        f'extern "C" __global__ void many(int* out, {", ".join("unsigned " + n for n in names)})'
        f" {{ {' '.join(f'out[{place} + threadIdx.x] = 1;' for place in places)} }}"
    )
    _, image = oracle.machine_code(source)
    module, out = MODULE + 1, 0x7F0000000000
    assert in_hook.take(table.encode(module, 90, oracle.analysed(image).values())) == ""

    def written(numbers: list[int], *, remembered: bool) -> set[tuple[int, int]]:
        launch = Launch(struct.pack(f"<Q{count}I", out, *numbers), (32, 1, 1), (1, 1, 1))
        found = in_hook.accesses(module, "many", launch, remembered=remembered)
        assert found is not None
        assert not found.unknown
        return set(found.ranges["written"])

    for changed in range(count):
        numbers = [1000 * i for i in range(count)]
        numbers[changed] += 1 << 20
        begins = [4 * sum(numbers[at : at + together]) for at in range(0, count, together)]
        expected = {(out + begin, out + begin + 128) for begin in begins}
        for remembered in False, True, True:
            assert written(numbers, remembered=remembered) == expected
