"""Measure how long a program takes to be saved and ended, with an image in memory and on the disk.

    python -m bench.ending [--count N] [--memory-tier SIZE] [--state DIR] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``. In each round it is saved and ended as ``phos checkpoint --end
--in-memory`` does, restored, saved and ended as ``--end`` does, and restored; it must go on with
the iteration that comes next. The rate of the disk that holds DIR is measured first. Prints one
JSON object a round.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from bench.checkpoint import Training, gone, wait_until
from bench.series import phases, start
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.service.config_values import size

_PIECE = 64 << 20
_PIECES = 64


def rate(folder: Path) -> float:
    """Return at how many GB/s the disk takes a new file of 4 GiB, until it is durable."""
    piece = os.urandom(_PIECE)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.monotonic()
        for _ in range(_PIECES):
            file.write(piece)
        os.fsync(file.fileno())
        return _PIECE * _PIECES / (time.monotonic() - began) / 1e9


def end_and_restore(node: Node, training: Training, *, in_memory: bool) -> dict[str, object]:
    """Save and end the program, and restore it."""
    pid = training.process.pid
    saving = Progress()
    began = time.monotonic()
    image = checkpoint(node, pid, CheckpointOptions(then="end", in_memory=in_memory), saving)
    if training.process.returncode is None:
        training.process.wait()
    wait_until(lambda: gone((pid,)), "the pid to be free", training.log)
    ended = time.monotonic() - began
    last = max(training.losses())
    at = training.lines()
    began = time.monotonic()
    restore(node, image.id, RestoreOptions(), Progress())
    training.wait_for(1)
    first = time.monotonic() - began
    node.store.delete(image.id)
    return {
        "seconds": round(ended, 3),
        "phases_s": phases(saving),
        "device_bytes": image.device_bytes,
        "restored_to_first_iteration_s": round(first, 3),
        "goes_on_with_the_next": min(training.losses(at)) == last + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2, help="rounds")
    parser.add_argument("--memory-tier", default="64G")
    parser.add_argument("--state", type=Path, default=Path("/var/tmp"))
    parser.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phos-bench-", dir=arguments.state) as name:
        folder = Path(name)
        disk = rate(folder)
        config = NodeConfig(
            folder / "state", folder / "run", memory_tier=size(arguments.memory_tier)
        )
        with Node(config) as node:
            training = start(folder / "output", config.runtime_dir, *arguments.program, hooked=True)
            training.wait_for(10)
            for _ in range(arguments.count):
                found = {
                    way: end_and_restore(node, training, in_memory=way == "in memory")
                    for way in ("in memory", "durable")
                }
                report = {"program": " ".join(arguments.program), "disk_gb_per_s": round(disk, 2)}
                print(json.dumps(report | found), flush=True)
            training.kill()


if __name__ == "__main__":
    main()
