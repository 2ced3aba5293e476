"""Checkpoint, kill and restore a real training run, and time every phase.

    python -m bench.checkpoint [--size small|xl] [--mode stop|driver] [--state DIR] ...

Starts ``bench/programs/gpt2.py`` (under the hook for mode ``stop``), checkpoints it, lets it go on
and notes its losses, kills it with SIGKILL, restores it, and compares the losses that follow. Prints
one JSON object a case.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.native import hook_library
from phosd.engine.node import Node, NodeConfig
from phosd.engine.progress import Progress
from phosd.engine.restore import RestoreOptions, restore

PROGRAM = Path(__file__).parent / "programs" / "gpt2.py"
PATIENCE = 240.0


@dataclass
class Training:
    """The program under test; its output is an append-only file, as ``phos run`` makes it."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def losses(self) -> dict[int, str]:
        """The loss of each iteration, as the last line about it says."""
        return {int(n): loss for n, loss, _ in self._lines()}

    def seconds(self, since: int) -> list[float]:
        """How long each iteration took, from line ``since`` on."""
        return [float(seconds) for _, _, seconds in self._lines()[since:]]

    def lines(self) -> int:
        """How many iterations have been printed."""
        return len(self._lines())

    def wait_for(self, more: int) -> None:
        """Return when ``more`` further lines are there."""
        goal = self.lines() + more
        wait_until(lambda: self.lines() >= goal, f"{more} iterations", self.log)

    def _lines(self) -> list[list[str]]:
        text = self.log.read_text()
        fields = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [f for f in fields if len(f) == 3 and f[0].isdigit()]


def wait_until(condition: Callable[[], bool], what: str, log: Path) -> None:
    """Poll until ``condition``; fails with the end of ``log``."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited in vain for {what}:\n{log.read_text()[-3000:]}")
        time.sleep(0.01)


def start(folder: Path, runtime: Path, arguments: argparse.Namespace) -> Training:
    """Start the training in a session of its own."""
    log = folder / "losses"
    environment = os.environ | {"PHOS_RUNTIME_DIR": str(runtime)}
    if arguments.mode == "stop":
        environment["LD_PRELOAD"] = str(hook_library())
    words = [
        sys.executable,
        str(PROGRAM),
        "--size",
        arguments.size,
        "--batch",
        str(arguments.batch),
    ]
    if arguments.deterministic:
        words.append("--deterministic")
    with log.open("ab") as out:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    return Training(process, log)


def phases(progress: Progress) -> dict[str, float]:
    """Seconds a phase."""
    return {p.name: round((p.end or p.start) - p.start, 3) for p in progress.phases}


def gone(pids: tuple[int, ...]) -> bool:
    """Whether none of the pids is in use."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def case(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """One checkpoint, kill and restore; what it took and whether the losses are equal."""
    runtime, state = folder / "run", Path(arguments.state) / "phos-state"
    config = NodeConfig(state, runtime, staging_limit=arguments.staging, ring_bytes=None)
    with Node(config) as node:
        node.mover(0)
        training = start(folder, runtime, arguments)
        pid = training.process.pid
        training.wait_for(10)
        before = statistics.median(training.seconds(5))
        saving = Progress()
        options = CheckpointOptions(mode=arguments.mode)
        manifest = checkpoint(node, pid, options, saving)
        if arguments.again:
            training.wait_for(3)
            saving = Progress()
            node.store.delete(manifest.id)
            manifest = checkpoint(node, pid, options, saving)
        at = training.lines()
        training.wait_for(arguments.compare + 2)
        after = statistics.median(training.seconds(at))
        original = training.losses()
        os.killpg(pid, signal.SIGKILL)
        training.process.wait()
        wait_until(lambda: gone((pid,)), "the pid to be free", training.log)
        at = training.lines()
        loading = Progress()
        began = time.perf_counter()
        restored = restore(node, manifest.id, RestoreOptions(), loading)
        wait_until(lambda: training.lines() > at, "the first iteration", training.log)
        to_first = time.perf_counter() - began
        training.wait_for(arguments.compare)
        continued = {int(n): loss for n, loss, _ in training._lines()[at:]}
        common = sorted(original.keys() & continued.keys())
        os.killpg(restored.pid, signal.SIGKILL)
        node.store.delete(manifest.id)
    cpu_bytes = sum(f.size for tree in manifest.trees for f in tree.files)
    stop = phases(saving)
    drain = stop.get("drain", 0.0)
    return {
        "case": f"gpt2-{arguments.size}",
        "mode": arguments.mode,
        "state": arguments.state,
        "device_bytes": manifest.device_bytes,
        "cpu_bytes": cpu_bytes,
        "blocks": len(manifest.blocks),
        "stop_s": round(saving.stop_seconds, 3),
        "stop_without_copy_s": round(saving.stop_seconds - drain, 3),
        "copy_gb_per_s": round(manifest.device_bytes / drain / 1e9, 2) if drain else None,
        "checkpoint_phases_s": stop,
        "restore_s": round(restored.seconds, 3),
        "restore_to_first_iteration_s": round(to_first, 3),
        "restore_phases_s": phases(loading),
        "iteration_s": {"before": before, "after": after},
        "values_compared": len(common),
        "values_equal": all(original[n] == continued[n] for n in common),
        "notes": saving.notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=["small", "xl"], default="small")
    parser.add_argument("--mode", choices=["stop", "driver"], default="stop")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--state", default="/dev/shm", help="where the image goes")
    parser.add_argument("--staging", type=int, default=None, help="bytes CRIU may keep in memory")
    parser.add_argument("--compare", type=int, default=20, help="iterations to compare")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--again", action="store_true", help="measure a second checkpoint")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as folder:
        print(json.dumps(case(arguments, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
