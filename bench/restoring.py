"""Measure how long a program takes to be restored from memory or from disk, by phase.

    python -m bench.restoring [--times N] [--mode stop|driver] [--pidns] [--memory-tier SIZE]
        [--state DIR] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``. It is saved once and killed, and then restored, let run for a
line of output, and killed, again and again; with ``--pidns`` in a pid namespace of its own. In mode
``driver`` it has no hook, and its device memory is in CRIU's files, as with cuda-checkpoint. With
``--memory-tier 0`` the image is on the disk, and the kernel's cache is emptied of it before each
restore. Prints one JSON object: the seconds of each restore, with its phases, and until the next
line.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.checkpoint import gone, wait_until
from bench.series import phases, start
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import list_gpus
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.service.config_values import size

_LINES = 5
"""Lines of output before it is saved."""
_REST = 1.0
"""Seconds after a kill, in which the driver gives back what the program had."""


def await_lines(log: Path, more: int) -> None:
    """Wait until the program has printed so many more lines."""
    goal = log.read_bytes().count(b"\n") + more
    wait_until(lambda: log.read_bytes().count(b"\n") >= goal, f"{more} lines", log)


def forget(folder: Path) -> None:
    """Make the kernel drop what it keeps in memory of the files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="restores (%(default)s)")
    parser.add_argument("--mode", choices=("stop", "driver"), default="stop")
    parser.add_argument("--pidns", action="store_true", help="in a pid namespace")
    parser.add_argument("--memory-tier", default="100G")
    parser.add_argument("--state", type=Path, default=Path("/var/tmp"))
    parser.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phos-bench-", dir=arguments.state) as name:
        folder = Path(name)
        config = NodeConfig(
            folder / "state", folder / "run", memory_tier=size(arguments.memory_tier)
        )
        with Node(config) as node:
            node.movers.keep_standbys(gpu.ordinal for gpu in list_gpus())  # as the service does
            log = folder / "log"
            hooked = arguments.mode != "driver"
            training = start(log, folder / "run", *arguments.program, hooked=hooked)
            await_lines(log, _LINES)
            pid = training.process.pid
            image = checkpoint(node, pid, CheckpointOptions(mode=arguments.mode), Progress())
            training.kill()
            options = RestoreOptions(pid_namespace=True) if arguments.pidns else RestoreOptions()
            rows, seconds = [], []
            for _ in range(arguments.times):
                time.sleep(_REST)
                if node.store.memory is None:
                    forget(config.state_dir)
                progress = Progress()
                began = time.monotonic()
                result = restore(node, image.id, options, progress)
                took = time.monotonic() - began
                await_lines(log, 1)
                first = time.monotonic() - began
                seconds.append(round(took, 3))
                rows.append(
                    {
                        "seconds": seconds[-1],
                        "to_next_line_s": round(first, 3),
                        "phases_s": phases(progress),
                    }
                )
                os.kill(result.pid, signal.SIGKILL)
                wait_until(partial(gone, (result.pid,)), "its end", log)
            node.store.delete(image.id)
    found = {
        "program": arguments.program,
        "mode": arguments.mode,
        "device_bytes": image.device_bytes,
        "host_bytes": sum(file.size for tree in image.trees for file in tree.files),
        "pidns": arguments.pidns,
        "memory_tier": arguments.memory_tier,
        "median_s": statistics.median(seconds),
        "restores": rows,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
