"""Measure what the hook, and NCCL's variables that ``phos run`` sets, cost an all-reduce.

    python -m bench.bandwidth [--ranks 2] [--pairs 3] [--bytes N]

Runs ``bench/programs/all_reduce.py`` in turn: as it is, under the hook, with the variables, with
both; each time another one begins. NCCL_NVLS_ENABLE=0 stands in each of them if it is set here.
Prints one JSON object: for each the median bus bandwidth of its runs in GB/s and the ratio to the
first, and the spread of the runs as they are, below which a ratio means nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

from bench.series import PROGRAMS, interpreter
from phosd.cli.run_command.environment import do_without_what_cannot_be_saved
from phosd.engine.system.native import hook_library

_WAYS = {
    "plain": (False, False),
    "hook": (True, False),
    "variables": (False, True),
    "hook and variables": (True, True),
}
"""Whether the program has the hook, and whether it has the variables."""


def run(arguments: argparse.Namespace, *, hooked: bool, variables: bool) -> float:
    """Return the median bus bandwidth of a run in GB/s."""
    environment = dict(os.environ)
    if variables:
        do_without_what_cannot_be_saved(environment)
    words = [str(PROGRAMS / "all_reduce.py"), "--bytes", str(arguments.bytes)]
    with tempfile.TemporaryDirectory() as runtime:
        if hooked:
            environment |= {"LD_PRELOAD": str(hook_library()), "PHOS_RUNTIME_DIR": runtime}
        done = subprocess.run(
            [*interpreter(arguments.ranks), *words],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return statistics.median(map(float, done.stdout.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    arguments = parser.parse_args()
    runs: dict[str, list[float]] = {name: [] for name in _WAYS}
    ways = list(_WAYS.items())
    for turn in range(arguments.pairs):
        first = turn % len(ways)
        for name, (hooked, variables) in ways[first:] + ways[:first]:
            runs[name].append(run(arguments, hooked=hooked, variables=variables))
    medians = {name: statistics.median(found) for name, found in runs.items()}
    report = {
        "case": f"all-reduce of {arguments.bytes} bytes, {arguments.ranks} ranks",
        "nvls": os.environ.get("NCCL_NVLS_ENABLE", "not set"),
        "bus_gb_per_s": medians,
        "ratio": {name: median / medians["plain"] for name, median in medians.items()},
        "runs": runs,
        "spread_of_plain": max(runs["plain"]) / min(runs["plain"]) - 1,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
