"""Measure the overhead of the hook in a program that is never checkpointed.

    python -m bench.overhead [--size small|xl] [--pairs N] [--iterations N]

Runs ``bench/programs/gpt2.py`` alternately with and without the hook, and compares the time of an
iteration. Prints one JSON object: medians, their ratio, and the spread of the runs without the
hook, below which a ratio means nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.checkpoint import apart
from phosd.engine.system.native import hook_library

PROGRAM = Path(__file__).parent / "programs" / "gpt2.py"
WARM_UP = 10


def run(arguments: argparse.Namespace, *, hooked: bool) -> tuple[list[float], list[str]]:
    """Return the seconds of each iteration after the warm-up, and all losses."""
    words = [sys.executable, str(PROGRAM), "--size", arguments.size]
    words += ["--batch", str(arguments.batch), "--iterations", str(arguments.iterations)]
    with tempfile.TemporaryDirectory() as runtime:
        extra = {"LD_PRELOAD": str(hook_library()), "PHOS_RUNTIME_DIR": runtime} if hooked else {}
        done = subprocess.run(
            words, env=os.environ | extra, stdout=subprocess.PIPE, text=True, check=True
        )
    fields = [line.split() for line in done.stdout.splitlines()]
    return [float(f[2]) for f in fields[WARM_UP:]], [f[1] for f in fields]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=["small", "xl"], default="xl")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60)
    arguments = parser.parse_args()
    medians: dict[bool, list[float]] = {False: [], True: []}
    losses: list[dict[int, str]] = []
    for _ in range(arguments.pairs):
        for hooked in (False, True):
            seconds, values = run(arguments, hooked=hooked)
            medians[hooked].append(statistics.median(seconds))
            losses.append(dict(enumerate(values)))
    plain, hooked_s = (statistics.median(medians[hooked]) for hooked in (False, True))
    report = {
        "case": f"hook overhead, gpt2-{arguments.size}",
        "iteration_s": {"plain": plain, "hooked": hooked_s},
        "runs_s": {"plain": medians[False], "hooked": medians[True]},
        "slowdown_percent": round((hooked_s / plain - 1) * 100, 3),
        "spread_of_plain_percent": round((max(medians[False]) / min(medians[False]) - 1) * 100, 3),
        "losses_equal": all(values == losses[0] for values in losses),
        "losses_apart": max(apart(values, losses[0]) for values in losses),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
