"""Migrate, suspend or swap a running program repeatedly, and measure what that costs it.

    python -m bench.moving migrate [--mode precopy|driver] [--count N] [--against N] -- PROGRAM ...
    python -m bench.moving suspend [--where memory|disk] [--hollow] [--count N] [--against N]
        -- PROGRAM ...
    python -m bench.moving swap [--hollow] [--count N] -- PROGRAM ...

PROGRAM is one of ``bench/programs``; it runs under the hook (except in mode ``driver``) and prints
one line per iteration with its seconds. ``swap`` starts it twice, and the two take turns on one
GPU. ``--hollow`` leaves the contexts there. ``--against N`` first runs it undisturbed, and compares
the values of the first N iterations. Prints one JSON object.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.checkpoint import Training
from bench.series import phases, start, undisturbed
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import list_gpus
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.service.config_values import size

_REST = 1.0
"""Seconds before a resume: what stands by for the next mover is started after the suspension."""
_SETTLE = 10
"""Iterations before the first operation."""

Result = dict[str, Any]


def timed(operation: Callable[[Progress], object]) -> Result:
    """Run an operation; return its seconds, phases, rates and notes."""
    progress = Progress()
    began = time.perf_counter()
    operation(progress)
    moved = [p for p in progress.phases if p.bytes_done and p.end is not None]
    return {
        "seconds": time.perf_counter() - began,
        "stop_s": progress.stop_seconds,
        "phases_s": phases(progress),
        "rates_gb_s": [
            (p.name, p.bytes_done / 1e9, p.bytes_done / 1e9 / ((p.end or 0) - p.start))
            for p in moved
        ],
        "details": progress.figures.measured(),
        "notes": progress.notes,
    }


def around(training: Training, between: int, operation: Callable[[Progress], object]) -> Result:
    """Run an operation as :func:`timed` does, and measure what it costs the program. ``stolen_s``
    is the extra time of the iterations around it, compared with the ``between`` that follow, less
    the stop; ``longest_s`` is the longest of them.
    """
    first = training.lines()
    result = timed(operation)
    training.wait_for(2)
    during = training.seconds(first)
    quiet = training.lines()
    training.wait_for(between)
    usual = statistics.median(training.seconds(quiet))
    extra = sum(seconds - usual for seconds in during)
    return result | {
        "usual_iteration_s": usual,
        "iterations_around": len(during),
        "stolen_s": extra - result["stop_s"],
        "longest_s": max(during),
    }


def used(pid: int) -> list[list[int]]:
    """Return for each GPU the bytes in use, and whether NVML lists the process there."""
    return [[gpu.memory_used or 0, int(pid in gpu.pids)] for gpu in list_gpus()]


def migrations(node: Node, training: Training, arguments: argparse.Namespace) -> list[Result]:
    """Migrate there and back, ``--count`` times in all."""
    pid = training.process.pid
    results = []
    for number in range(arguments.count):
        options = MigrateOptions(str(1 - number % 2), mode=arguments.mode)
        result = around(training, arguments.between, partial(migrate, node, pid, options))
        results.append(result | {"to": options.to, "used": used(pid)})
    return results


def suspensions(node: Node, training: Training, arguments: argparse.Namespace) -> list[Result]:
    """Suspend and resume, ``--count`` times."""
    pid = training.process.pid
    results = []
    for _ in range(arguments.count):
        options = SuspendOptions(arguments.where, hollow=arguments.hollow)
        off = timed(partial(suspend, node, pid, options))
        time.sleep(_REST)
        between, lines, began = used(pid), training.lines(), time.monotonic()
        on = timed(partial(resume, node, pid, ResumeOptions()))
        training.wait_for(arguments.between)
        first = training.iterations(lines)[0].end - began
        results.append({"suspend": off, "used": between, "resume": on, "to_an_iteration_s": first})
    return results


def swaps(
    node: Node, training: Training, other: Training, arguments: argparse.Namespace
) -> list[Result]:
    """Swap two programs on one GPU; at first ``training`` is suspended and ``other`` runs."""
    results = []
    leaving, coming = other, training
    options = SwapOptions(hollow=arguments.hollow)
    for _ in range(arguments.count):
        pids = leaving.process.pid, coming.process.pid
        result = timed(partial(swap, node, *pids, options))
        before = time.perf_counter()
        coming.wait_for(2)
        results.append(result | {"two_iterations_after_s": time.perf_counter() - before})
        leaving, coming = coming, leaving
    return results


def case(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run one kind of operation on one program repeatedly."""
    config = NodeConfig(
        Path(arguments.state) / "phos-moving",
        folder / "run",
        memory_tier=size(arguments.memory_tier),
    )
    expected = undisturbed(folder, arguments)
    hooked = arguments.mode != "driver"
    with ExitStack() as stack:
        node = stack.enter_context(Node(config))
        node.movers.keep_standbys(gpu.ordinal for gpu in list_gpus())  # as the service does

        def begin(name: str) -> Training:
            log = folder / name
            training = start(log, config.runtime_dir, *arguments.program, hooked=hooked)
            stack.callback(os.killpg, training.process.pid, signal.SIGKILL)
            training.wait_for(_SETTLE)
            return training

        training = begin("output")
        (found,) = [p for p in node.processes() if p.pid == training.process.pid]
        answer: dict[str, object] = {
            "moving": " ".join(arguments.program),
            "operation": arguments.operation,
            "mode": arguments.mode,
            "where": arguments.where,
            "hollow": arguments.hollow,
            "device_bytes": found.device_bytes,
        }
        match arguments.operation:
            case "migrate":
                results = migrations(node, training, arguments)
            case "suspend":
                results = suspensions(node, training, arguments)
            case _:
                pid = training.process.pid
                off = SuspendOptions(hollow=arguments.hollow)
                answer["first_suspend"] = timed(partial(suspend, node, pid, off))
                results = swaps(node, training, begin("other"), arguments)
                for suspended in node.suspended.living():
                    resume(node, suspended.pid, ResumeOptions(), Progress())
        answer["results"] = results
        if "stop_s" in results[0]:
            stops = [result["stop_s"] for result in results]
            answer |= {"stop_median_s": statistics.median(stops), "stop_max_s": max(stops)}
        if expected:
            training.wait_for(max(0, arguments.against - training.lines()))
            losses = training.losses()
            answer |= {
                "values_against_undisturbed": len(expected),
                "equal_to_undisturbed": all(losses[n] == v for n, v in expected.items()),
            }
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operation", choices=["migrate", "suspend", "swap"])
    parser.add_argument("--mode", default="precopy", choices=["precopy", "driver"])
    parser.add_argument("--where", default="memory", choices=["memory", "disk"])
    parser.add_argument("--hollow", action="store_true")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--between", type=int, default=5)
    parser.add_argument("--against", type=int, default=0)
    parser.add_argument("--state", default="/dev/shm")
    parser.add_argument("--memory-tier", default="100G", help="beside it, memory is suspended to")
    parser.add_argument("program", nargs="+")
    parser.set_defaults(torchrun=0)  # of what bench.series starts
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phos-moving-") as folder:
        print(json.dumps(case(arguments, Path(folder))))


if __name__ == "__main__":
    main()
