"""Find out whether programs that share a GPU survive the checkpoints of some of them.

    python -m bench.neighbours [--how nothing gate driver-alone driver stop ...] [--programs N]
                               [--saved K] [--in-turn] [--times T] [--seconds S] [--gap MS]

Starts N programs whose kernels wait on the device for each other (``bench/programs/spinning.py``)
on one GPU, saves K of them T times each, all K at the same time or one after the other, and lets
all of them run for S seconds. In ``gate`` phosd only closes and opens the gates; ``driver-alone``
is the driver's checkpoint and restore of programs without the hook, without phosd, which may have
to be tried several times. Prints one JSON object for each way: how many programs died, their last
words, and the driver's messages (Xid) in the kernel's log.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.program.discovery import discover_group
from phosd.engine.system.cuda import driver, is_software
from phosd.engine.system.native import hook_library, softgpu_folder
from phosd.errors import PhosError

_PROGRAM = Path(__file__).parent / "programs" / "spinning.py"
_START_SECONDS = 60.0
_LOCK_MILLISECONDS = 2000
_TRIES = 4
"""Attempts for each checkpoint that is to succeed."""
_ON_WRITE = "on-write"
"""Mode ``concurrent`` without room for a snapshot."""
WAYS = ("nothing", "gate", "driver-alone", "driver", "stop", "recopy", "concurrent", _ON_WRITE)


@dataclass
class Spinning:
    """One of the programs, with the files that it writes to."""

    process: "subprocess.Popen[bytes]"
    output: Path
    errors: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def rounds(self) -> int:
        """How many rounds it has made."""
        return self.output.read_bytes().count(b"\n")

    @property
    def dead(self) -> bool:
        """Whether it has ended by itself."""
        return self.process.poll() is not None

    @property
    def last_words(self) -> str:
        """The last line of its errors."""
        return (self.errors.read_text().strip().splitlines() or ["nothing"])[-1]


@contextmanager
def spinning(
    arguments: argparse.Namespace, folder: Path, runtime: Path | None
) -> Iterator[list[Spinning]]:
    """Run the programs, under the hook if there is a runtime folder for it."""
    environment = dict(os.environ)
    if is_software():
        environment["LD_LIBRARY_PATH"] = str(softgpu_folder())
    if runtime is not None:
        environment |= {"LD_PRELOAD": str(hook_library()), "PHOS_RUNTIME_DIR": str(runtime)}
    programs = []
    try:
        for number in range(arguments.programs):
            output, errors = folder / f"{number}.out", folder / f"{number}.err"
            with output.open("wb") as out, errors.open("wb") as err:
                process = subprocess.Popen(
                    [sys.executable, str(_PROGRAM), str(arguments.gap)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            programs.append(Spinning(process, output, errors))
        end = time.monotonic() + _START_SECONDS
        while any(each.rounds < 10 for each in programs) and time.monotonic() < end:
            time.sleep(0.1)
        yield programs
    finally:
        for each in programs:
            each.process.kill()
            each.process.wait()


def by_driver_alone(pid: int) -> None:
    """Checkpoint and restore a process through the driver's API. Raises :class:`RuntimeError`."""
    cuda = driver()
    patience = cuda.CUcheckpointLockArgs()
    patience.timeoutMs = _LOCK_MILLISECONDS
    for step, arguments in (("Lock", patience), ("Checkpoint", None), ("Restore", None)):
        (status,) = getattr(cuda, f"cuCheckpointProcess{step}")(pid, arguments)
        if int(status) != 0:
            raise RuntimeError(f"{step}: {status.name}")
    cuda.cuCheckpointProcessUnlock(pid, None)


def by_phosd(node: Node, way: str) -> Callable[[int], object]:
    """Return what saves a process in this way."""

    def gate(pid: int) -> None:
        group = discover_group(pid, node.config.runtime_dir, lambda tree: None)
        progress = Progress()
        with group as found:
            progress.about_to_touch(found.affected)
            with closed_gates(found.links, progress):
                time.sleep(0.05)

    options = CheckpointOptions(mode="concurrent" if way == _ON_WRITE else way)
    return gate if way == "gate" else lambda pid: checkpoint(node, pid, options, Progress())


def measure(way: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the result of one way."""
    outcomes: Counter[str] = Counter()
    turn = Lock() if arguments.in_turn else nullcontext()

    def repeatedly(save: Callable[[int], object], program: Spinning) -> None:
        done = 0
        for _ in range(_TRIES * arguments.times):
            if done == arguments.times or program.dead:
                break
            try:
                with turn:
                    save(program.pid)
                outcomes["done"] += 1
                done += 1
            except (PhosError, RuntimeError) as error:
                outcomes[f"{type(error).__name__}: {error}"[:120]] += 1
            time.sleep(0.1)

    before = xids()
    with tempfile.TemporaryDirectory(prefix="phos-", dir="/var/tmp") as name:
        place = Path(name)
        hooked = way != "driver-alone"
        with (
            Node(
                NodeConfig(
                    state_dir=place / "state",
                    runtime_dir=place / "run",
                    snapshots=way != _ON_WRITE,
                )
            ) as node,
            spinning(arguments, place, place / "run" if hooked else None) as programs,
            ThreadPoolExecutor(arguments.saved) as pool,
        ):
            save = by_phosd(node, way) if hooked else by_driver_alone
            if way != "nothing":
                chosen = programs[: arguments.saved]
                list(pool.map(lambda each: repeatedly(save, each), chosen))
            began = [each.rounds for each in programs]
            time.sleep(arguments.seconds)
            dead = [number for number, each in enumerate(programs) if each.dead]
            return {
                "way": way,
                "programs": arguments.programs,
                "saved": arguments.saved,
                "in_turn": arguments.in_turn,
                "gap": arguments.gap,
                "outcomes": dict(outcomes),
                "dead": dead,
                "last_words": sorted({programs[number].last_words for number in dead}),
                "rounds_afterwards": [
                    each.rounds - first for each, first in zip(programs, began, strict=True)
                ],
                "xids": xids()[len(before) :][:6],
            }


def xids() -> list[str]:
    """Return the driver's error messages in the kernel's log; none if it may not be read."""
    said = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return [line for line in said.splitlines() if "Xid" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--programs", type=int, default=8)
    parser.add_argument("--saved", type=int, default=1)
    parser.add_argument("--in-turn", action="store_true", help="save one program at a time")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--gap", type=float, default=0, help="milliseconds that a kernel waits")
    arguments = parser.parse_args()
    for way in arguments.how:
        print(json.dumps(measure(way, arguments)), flush=True)


if __name__ == "__main__":
    main()
