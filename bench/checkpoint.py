"""Checkpoint, kill and restore a real training run, and time every phase.

    python -m bench.checkpoint [--size small|xl] [--mode stop|driver] [--state DIR] ...

Starts ``bench/programs/gpt2.py`` (under the hook for mode ``stop``), checkpoints it, records its
losses while it runs on, kills it with SIGKILL, restores it, and compares the losses that follow.
Prints one JSON object per case.
"""

import argparse
import contextlib
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
from typing import NamedTuple

from phosd.engine.image.store import Store
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.program.tree import scan
from phosd.engine.system.native import hook_library

PROGRAM = Path(__file__).parent / "programs" / "gpt2.py"
PATIENCE = 240.0


class Iteration(NamedTuple):
    """Duration of an iteration in seconds, and its end on the monotonic clock."""

    seconds: float
    end: float


@dataclass
class Training:
    """The program under test; its output is an append-only file, as ``phos run`` makes it."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def losses(self, since: int = 0) -> dict[int, str]:
        """Return the loss of each iteration from line ``since`` on; a repeated iteration's last
        line counts.
        """
        return {int(n): loss for n, loss, *_ in self._lines()[since:]}

    def seconds(self, since: int) -> list[float]:
        """Return the seconds of each iteration from line ``since`` on."""
        return [iteration.seconds for iteration in self.iterations(since)]

    def iterations(self, since: int) -> list[Iteration]:
        """Return the iterations from line ``since`` on."""
        return [Iteration(float(took), float(end)) for *_, took, end in self._lines()[since:]]

    def lines(self) -> int:
        """Return how many iterations have been printed."""
        return len(self._lines())

    def wait_for(self, more: int) -> None:
        """Wait until ``more`` further lines are printed."""
        goal = self.lines() + more
        wait_until(lambda: self.lines() >= goal, f"{more} iterations", self.log)

    def kill(self) -> None:
        """Kill the program with its process tree, and wait until the pids are free."""
        tree = kill_tree(self.process.pid)
        if self.process.returncode is None:
            self.process.wait()
        wait_until(lambda: gone(tree), "the pids to be free", self.log)

    def _lines(self) -> list[list[str]]:
        text = self.log.read_text()
        fields = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [f for f in fields if len(f) == 4 and f[0].isdigit()]


def wait_until(
    condition: Callable[[], bool], what: str, log: Path, patience: float = PATIENCE
) -> None:
    """Poll until ``condition`` is true; exit with the end of ``log`` after a timeout."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            output = log.read_text()[-3000:] if log.is_file() else ""
            sys.exit(f"waited in vain for {what}:\n{output}")
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


@dataclass(frozen=True)
class Outcome:
    """Result of an operation. Times are in seconds; ``result`` is the image's id or the restored
    pid.
    """

    result: str
    seconds: float
    stop_seconds: float
    phases: dict[str, float]
    notes: list[str]


class Direct:
    """Runs the engine in this process."""

    def __init__(self, config: NodeConfig) -> None:
        self._node = Node(config)
        self._node.movers.mover(0)

    def checkpoint(self, pid: int, mode: str) -> Outcome:
        """Checkpoint ``pid``."""
        options = CheckpointOptions(mode=mode)
        return self._run(lambda p: checkpoint(self._node, pid, options, p).id)

    def restore(self, image: str) -> Outcome:
        """Restore ``image``."""
        return self._run(lambda p: str(restore(self._node, image, RestoreOptions(), p).pid))

    def close(self) -> None:
        """End the movers."""
        self._node.close()

    @staticmethod
    def _run(operation: Callable[[Progress], str]) -> Outcome:
        progress = Progress()
        start = time.perf_counter()
        result = operation(progress)
        seconds = time.perf_counter() - start
        took = {p.name: (p.end or p.start) - p.start for p in progress.phases}
        return Outcome(result, seconds, progress.stop_seconds, took, progress.notes)


class ThroughDaemon:
    """Runs a daemon on a private bus, and calls it with the command line."""

    def __init__(self, config: NodeConfig) -> None:
        self._bus = subprocess.Popen(
            ["dbus-daemon", "--session", "--nofork", "--print-address"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._bus.stdout is not None
        address = self._bus.stdout.readline().strip()
        self._phos = [sys.executable, "-m", "phosd.cli.main", "--bus", address, "--json"]
        self._daemon = subprocess.Popen(
            [
                *(sys.executable, "-m", "phosd.service.main", "--session"),
                *("--state-dir", str(config.state_dir), "--runtime-dir", str(config.runtime_dir)),
            ],
            env=os.environ | {"DBUS_SESSION_BUS_ADDRESS": address},
        )

    def checkpoint(self, pid: int, mode: str) -> Outcome:
        """Run ``phos checkpoint``."""
        return self._run("checkpoint", str(pid), "--mode", mode)

    def restore(self, image: str) -> Outcome:
        """Run ``phos restore``."""
        return self._run("restore", image)

    def close(self) -> None:
        """End daemon and bus."""
        self._daemon.terminate()
        self._daemon.wait()
        self._bus.terminate()
        self._bus.wait()

    def _run(self, *words: str) -> Outcome:
        start = time.perf_counter()
        done = subprocess.run([*self._phos, *words], stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - start
        job = json.loads(done.stdout.splitlines()[-1])
        took = {phase["name"]: phase["seconds"] for phase in job["phases"]}
        result = str(job["result"])
        return Outcome(result, seconds, job["stop_seconds"], took, job["notes"])


def kill_tree(root: int) -> tuple[int, ...]:
    """Kill a process with its tree; return their pids. Raises :class:`NoSuchProcess`."""
    tree = scan(root).pids
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return tree


def gone(pids: tuple[int, ...]) -> bool:
    """Whether all the pids are free."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def case(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run one checkpoint, kill and restore; return the times and whether the losses are equal."""
    runtime, state = folder / "run", Path(arguments.state) / "phos-state"
    config = NodeConfig(state, runtime, staging_limit=arguments.staging)
    phosd = ThroughDaemon(config) if arguments.daemon else Direct(config)
    with contextlib.closing(phosd):
        wait_until((runtime / "hook").is_dir, "the runtime folder", folder)
        training = start(folder, runtime, arguments)
        pid = training.process.pid
        training.wait_for(10)
        before = statistics.median(training.seconds(5))
        saved = phosd.checkpoint(pid, arguments.mode)
        store = Store(state)
        if arguments.again:
            training.wait_for(3)
            store.delete(saved.result)
            saved = phosd.checkpoint(pid, arguments.mode)
        at = training.lines()
        training.wait_for(arguments.compare + 2)
        after = statistics.median(training.seconds(at))
        original = training.losses()
        os.killpg(pid, signal.SIGKILL)
        training.process.wait()
        wait_until(lambda: gone((pid,)), "the pid to be free", training.log)
        at = training.lines()
        began = time.perf_counter()
        restored = phosd.restore(saved.result)
        wait_until(lambda: training.lines() > at, "the first iteration", training.log)
        to_first = time.perf_counter() - began
        training.wait_for(arguments.compare)
        continued = training.losses(at)
        common = sorted(original.keys() & continued.keys())
        os.killpg(pid, signal.SIGKILL)
        manifest = store.get(saved.result)
        store.delete(saved.result)
    drain = saved.phases.get("drain", 0.0)
    return {
        "case": f"gpt2-{arguments.size}",
        "mode": arguments.mode,
        "through": "D-Bus" if arguments.daemon else "the engine",
        "state": arguments.state,
        "device_bytes": manifest.device_bytes,
        "cpu_bytes": sum(f.size for tree in manifest.trees for f in tree.files),
        "blocks": len(manifest.blocks),
        "stop_s": round(saved.stop_seconds, 3),
        "stop_without_copy_s": round(saved.stop_seconds - drain, 3),
        "copy_gb_per_s": round(manifest.device_bytes / drain / 1e9, 2) if drain else None,
        "checkpoint_phases_s": {name: round(s, 3) for name, s in saved.phases.items()},
        "restore_s": round(restored.seconds, 3),
        "restore_to_first_iteration_s": round(to_first, 3),
        "restore_phases_s": {name: round(s, 3) for name, s in restored.phases.items()},
        "iteration_s": {"before": before, "after": after},
        "values_compared": len(common),
        "values_equal": all(original[n] == continued[n] for n in common),
        "values_apart": apart(original, continued),
        "transparent_hugepages": hugepages(),
        "notes": saved.notes,
    }


def apart(one: dict[int, str], other: dict[int, str]) -> float:
    """Return the largest difference between losses of the same iteration."""
    both = one.keys() & other.keys()
    return max(abs(float.fromhex(one[n]) - float.fromhex(other[n])) for n in both)


def hugepages() -> str:
    """Return the kernel's setting. CRIU and the driver copy their state faster with ``always``."""
    text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return text[text.index("[") + 1 : text.index("]")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=["small", "xl"], default="small")
    parser.add_argument("--mode", choices=["stop", "driver"], default="stop")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--state", default="/dev/shm", help="where the image goes")
    parser.add_argument("--staging", type=int, default=None, help="bytes CRIU may keep in memory")
    parser.add_argument("--compare", type=int, default=20, help="iterations to compare")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--daemon", action="store_true", help="through phosd and D-Bus")
    parser.add_argument("--again", action="store_true", help="measure a second checkpoint")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as folder:
        print(json.dumps(case(arguments, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
