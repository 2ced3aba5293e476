"""Count which launches of a program may be run again, as the hook says after an analysis."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.analysing import Analysed, analyse
from bench.launches import Counted, count, library_of, running, store
from bench.series import STATE
from phosd.engine.node.node import Node, NodeConfig


def verdicts(arguments: argparse.Namespace) -> None:
    """Run a program, have what it launches analysed, and count verdicts."""
    state = Path(arguments.state) / STATE
    with running(arguments.program) as (pid, runtime):
        with Node(NodeConfig(state, runtime)) as node:
            analysed = analyse(node, pid, arguments.analyse_seconds)
        first = count(pid, runtime, arguments.seconds)
        counted = count(pid, runtime, arguments.seconds)
        store(pid, counted, arguments)
        print(json.dumps(row(arguments, pid, analysed, first, counted)), flush=True)


def row(
    arguments: argparse.Namespace, pid: int, analysed: Analysed, first: Counted, counted: Counted
) -> dict[str, Any]:
    """Return the result: launches by verdict, in all and by library, and what looks took: the first
    ones with a table, and those after them, most of which the hook remembers.
    """
    libraries: defaultdict[str, dict[str, int]] = defaultdict(_none)
    for kernel in counted.kernels:
        each = {
            "kernels": 1,
            "launches": kernel.launches,
            "idempotent": kernel.idempotent,
            "not": kernel.overwrites,
            "unknown": kernel.undecided,
            "guessed": kernel.launches if kernel.guessed else 0,
        }
        for name in ("all", library_of(pid, counted.images.get(kernel.module))):
            for key, number in each.items():
                libraries[name][key] += number
    return {
        "verdicts": " ".join(arguments.program),
        "seconds": arguments.seconds,
        "analysed": analysed.row(),
        **libraries.pop("all", _none()),
        "first_looks": _took(first),
        "looks": _took(counted),
        "libraries": dict(sorted(libraries.items(), key=lambda one: -one[1]["launches"])),
    }


def _took(counted: Counted) -> dict[str, float]:
    looks = counted.looks
    return {
        "submissions": looks.submissions,
        "conservative": looks.conservative,
        "mean_s": looks.looked_ns / 1e9 / max(1, looks.submissions),
        "median_s": looks.look_median_ns / 1e9,
        "p99_s": looks.look_p99_ns / 1e9,
        "p999_s": looks.look_p999_ns / 1e9,
        "worst_s": looks.look_worst_ns / 1e9,
    }


def _none() -> dict[str, int]:
    return dict.fromkeys(("kernels", "launches", "idempotent", "not", "unknown", "guessed"), 0)
