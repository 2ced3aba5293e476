"""Measure restores on another GPU, rehearsals, and clones beside the program on several GPUs.

    python -m bench.clones [--gpus 0,1] [--against N] [--memory-tier SIZE] [--state DIR]
        -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``, deterministic. It is saved on GPU 0. While it runs, its image
is rehearsed, and cloned on every GPU of the list at once. Then it is killed, and restored on the
last GPU of the list. Each of them has printed, after ``N`` lines, what an undisturbed run prints.
Prints one JSON object.
"""

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.checkpoint import Training
from bench.one_program import parser, run
from bench.series import phases, start, undisturbed
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.rehearse import RehearseOptions, rehearse
from phosd.engine.operations.restore.restore import restore
from phosd.service.config_values import size

_LINES = 5
"""Lines of output before it is saved."""


def timed(operation: Callable[[Progress], Any]) -> tuple[Any, dict[str, Any]]:
    """Run an operation; return its result, and its seconds with their phases."""
    progress = Progress()
    began = time.monotonic()
    result = operation(progress)
    seconds = round(time.monotonic() - began, 3)
    return result, {"seconds": seconds, "phases_s": phases(progress), "notes": progress.notes}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--gpus", default="0", help="ordinals (%(default)s)")
    made.add_argument("--times", type=int, default=3, help="of each (%(default)s)")
    run(made, case)


def case(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything with one program."""
    gpus = [int(gpu) for gpu in arguments.gpus.split(",")]
    expected = undisturbed(folder, arguments)
    config = NodeConfig(folder / "state", folder / "run", memory_tier=size(arguments.memory_tier))
    rows: dict[str, list[dict[str, Any]]] = {"rehearsals": [], "clones": [], "elsewhere": []}

    with Node(config) as node:
        training = start(folder / "log", folder / "run", *arguments.program, hooked=True)
        training.wait_for(_LINES)
        image = checkpoint(node, training.process.pid, CheckpointOptions(mode="stop"), Progress())

        def values(shown: Training, pid: int) -> int:
            """Wait until it has printed what is compared, and kill it; how much is right?"""
            shown.wait_for(max(0, arguments.against - shown.lines()))
            os.kill(pid, signal.SIGKILL)
            found = shown.losses()
            if wrong := [n for n, value in expected.items() if found[n] != value]:
                raise SystemExit(f"{shown.log.name}: value {wrong[0]} is wrong")
            return len(expected)

        def clone(gpu: int, number: int) -> dict[str, Any]:
            clone_name = f"{gpu}-{number}"
            options = RestoreOptions(clone=clone_name, gpu=f"0:{gpu}")
            made, row = timed(lambda progress: restore(node, image.id, options, progress))
            shown = replace(training, log=training.log.with_name(f"log.clone-{clone_name}"))
            return row | {"gpu": gpu, "values_equal": values(shown, made.pid)}

        for number in range(arguments.times):
            rows["rehearsals"].append(
                timed(lambda progress: rehearse(node, image.id, RehearseOptions(), progress))[1]
            )
            with ThreadPoolExecutor(len(gpus)) as pool:
                rows["clones"] += pool.map(clone, gpus, [number] * len(gpus))
        training.wait_for(max(0, arguments.against - training.lines()))
        own = training.losses()
        training.kill()
        for gpu in gpus[-1:] * arguments.times:
            options = RestoreOptions(gpu=f"0:{gpu}")
            made, row = timed(lambda progress: restore(node, image.id, options, progress))  # noqa: B023
            rows["elsewhere"].append(row | {"gpu": gpu, "values_equal": values(training, made.pid)})
            time.sleep(1)
        node.store.delete(image.id)  # from memory, which is then unmounted
    return {
        "program": arguments.program,
        "device_bytes": image.device_bytes,
        "values": len(expected),
        "original_equal": all(own[n] == value for n, value in expected.items()),
        "median_s": {k: statistics.median(r["seconds"] for r in row) for k, row in rows.items()},
        **rows,
    }


if __name__ == "__main__":
    main()
