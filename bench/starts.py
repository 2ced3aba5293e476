"""Measure how soon a program runs that is started from an image, suspended, hollow, or ready.

    python -m bench.starts [--levels LEVEL,...] [--count N] [--against N] [--neighbour]
        [--memory-tier SIZE] [--state DIR] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``, deterministic. It is saved into memory and killed. Then clones
of it are made, one after the other, brought to a LEVEL (``image``: not made before it is started),
and started; ``to_an_iteration_s`` is the time until an iteration has ended. Each prints what an
undisturbed run prints. With ``--neighbour`` another clone computes beside them. Prints a JSON
object.
"""

import argparse
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from bench.checkpoint import Training, wait_until
from bench.clones import timed
from bench.one_program import parser, run
from bench.series import start, undisturbed
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import RestoreResult, restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.service.config_values import size

LEVELS = ("image", "suspended", "hollow", "ready")
_LOOK_SECONDS = 0.001
_LINES = 5
"""Lines of output before it is saved."""
_REST = 0.5
"""Seconds before a start, as between two requests."""

Row = dict[str, Any]


class Growth:
    """When a file grew, looked at each millisecond: the clocks of what was restored are others."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times: list[float] = []
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch)

    def since(self, moment: float) -> float | None:
        """Return after how many seconds it grew first; None if it has not."""
        return next((at - moment for at in self._times if at > moment), None)

    def _watch(self) -> None:
        known = 0
        while not self._over.wait(_LOOK_SECONDS):
            size = self._path.stat().st_size if self._path.exists() else 0
            if size > known > 0:  # else it is a copy of what the original has printed
                self._times.append(time.monotonic())
            known = size

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watching.join()


def begin(node: Node, image: str, name: str, level: str) -> tuple[int, Row, float]:
    """Make a clone, bring it to a level and start it. Returns its pid, what the start took by
    phases, and the moment at which it began, in seconds on the monotonic clock.
    """
    options = RestoreOptions(clone=name, hollow=level != "image")
    run: Callable[[Progress], Any] = partial(restore, node, image, options)
    if level != "image":
        pid = run(Progress()).pid
        if level == "suspended":
            suspend(node, pid, SuspendOptions(), Progress())
        if level == "ready":
            resume(node, pid, ResumeOptions(ready=True), Progress())
        run = partial(resume, node, pid, ResumeOptions())
    time.sleep(_REST)
    began = time.monotonic()
    result, row = timed(run)
    return result.pid if isinstance(result, RestoreResult) else pid, row, began


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return least, median, 99th percentile and most of some seconds."""
    last = sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
    return {
        "least": min(values),
        "median": statistics.median(values),
        "p99": last,
        "most": max(values),
    }


def case(arguments: argparse.Namespace, folder: Path) -> Row:
    """Run everything with one program."""
    expected = undisturbed(folder, arguments)
    config = NodeConfig(folder / "state", folder / "run", memory_tier=size(arguments.memory_tier))
    rows: dict[str, list[Row]] = {level: [] for level in arguments.levels.split(",")}

    with Node(config) as node:
        training = start(folder / "log", folder / "run", *arguments.program, hooked=True)
        training.wait_for(_LINES)
        image = checkpoint(node, training.process.pid, CheckpointOptions(mode="stop"), Progress())
        training.kill()

        def started(name: str, level: str) -> tuple[int, Training, Row]:
            shown = replace(training, log=training.log.with_name(f"log.clone-{name}"))
            with Growth(shown.log) as growth:
                pid, row, began = begin(node, image.id, name, level)
                wait_until(lambda: growth.since(began) is not None, "an iteration", shown.log)
            return pid, shown, row | {"to_an_iteration_s": growth.since(began)}

        def ended(pid: int, shown: Training) -> int:
            shown.wait_for(max(0, arguments.against - shown.lines()))
            os.kill(pid, signal.SIGKILL)
            found = shown.losses()
            if wrong := [n for n, value in expected.items() if found[n] != value]:
                raise SystemExit(f"{shown.log.name}: value {wrong[0]} is wrong")
            return len(expected)

        beside = started("beside", "image")[:2] if arguments.neighbour else None
        for number in range(arguments.count):
            for level, found in rows.items():
                pid, shown, row = started(f"{level}{number}", level)
                found.append(row | {"values_equal": ended(pid, shown)})
        if beside is not None:
            ended(*beside)
        node.store.delete(image.id)
    return {
        "starts": " ".join(arguments.program),
        "device_bytes": image.device_bytes,
        "neighbour": arguments.neighbour,
        "values": len(expected),
        "start_s": {k: spread([row["seconds"] for row in r]) for k, r in rows.items()},
        "to_an_iteration_s": {
            k: spread([row["to_an_iteration_s"] for row in r]) for k, r in rows.items()
        },
        "rows": rows,
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--levels", default=",".join(LEVELS), help="(%(default)s)")
    made.add_argument("--count", type=int, default=10, help="of each (%(default)s)")
    made.add_argument("--neighbour", action="store_true")
    run(made, case)


if __name__ == "__main__":
    main()
