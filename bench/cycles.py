"""Checkpoint, kill and restore a running program again and again, and compare its output.

    python -m bench.cycles [--mode MODE] [--count N] [--compare N] [--state DIR] [--unhooked]
        -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``. In each cycle it is saved, goes on, is killed with its whole
process tree, is restored, and must print the values that it had printed. Prints one JSON object a
cycle; ends with 1 if one failed.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from bench.checkpoint import Training
from bench.series import phases, start
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.errors import Busy

_TRIES = 5
"""Attempts at a checkpoint: while workers come and go it may ask to be tried again."""


def cycle(node: Node, training: Training, mode: str, compare: int) -> dict[str, object]:
    """Save, kill and restore the program once."""
    pid, busy = training.process.pid, 0
    while True:
        saving = Progress()
        try:
            manifest = checkpoint(node, pid, CheckpointOptions(mode=mode), saving)
            break
        except Busy:
            busy += 1
            if busy == _TRIES:
                raise
    training.wait_for(compare)
    original = training.losses()
    training.kill()
    at = training.lines()
    progress = Progress()
    result = restore(node, manifest.id, RestoreOptions(), progress)
    training.wait_for(compare)
    continued = training.losses(at)
    node.store.delete(manifest.id)
    common = original.keys() & continued.keys()
    return {
        "mode": manifest.mode,
        "busy": busy,
        "processes": len(manifest.processes),
        "device_bytes": manifest.device_bytes,
        "stop_s": round(saving.stop_seconds, 3),
        "saving_s": phases(saving),
        "restore_s": round(result.seconds, 3),
        "compared": len(common),
        "equal": bool(common) and all(original[n] == continued[n] for n in common),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--compare", type=int, default=8, help="iterations")
    parser.add_argument("--state", default="/dev/shm", help="where the images go")
    parser.add_argument("--unhooked", action="store_true")
    parser.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as name:
        folder = Path(name)
        config = NodeConfig(Path(arguments.state) / "phos-cycles", folder / "run")
        with Node(config) as node:
            hooked = not arguments.unhooked
            training = start(folder / "out", config.runtime_dir, *arguments.program, hooked=hooked)
            failed = False
            try:
                training.wait_for(arguments.compare)
                for _ in range(arguments.count):
                    found = cycle(node, training, arguments.mode, arguments.compare)
                    print(json.dumps(found), flush=True)
                    failed = failed or not found["equal"]
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(training.process.pid, signal.SIGKILL)
    sys.exit(failed)


if __name__ == "__main__":
    main()
