"""Checkpoint a running program repeatedly, and measure what that costs it.

    python -m bench.series [--mode concurrent|recopy|stop|driver] [--count N] [--kill TIMES]
        [--state DIR] [--memory-tier SIZE [--in-memory]] [--incremental] [--audit] [--seconds S]
        [--against N] [--torchrun RANKS] [--analyse] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``; it runs under the hook (except in mode ``driver``) and prints
one line per iteration with its seconds and its end. ``--torchrun`` starts one process of it for
each of RANKS GPUs. ``--kill`` kills it with its tree after the last checkpoint, restores it and
compares its further output, again and again. ``--against N`` first runs it without hook and
checkpoints, and compares the values of the first N iterations. ``--memory-tier`` makes images in
memory; ``durable_s`` are the seconds from the request until one is on the disk, too, where it is
written unless ``--in-memory`` is given. ``--analyse`` has what the program launches analysed
before the first checkpoint, so that the hook knows what launches write; what is found stays in DIR,
for the next series. Prints one JSON object; each checkpoint by itself on the standard error, as it
is made.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.analysing import analyse
from bench.checkpoint import Iteration, Training, hugepages
from phosd.cli.run_command.environment import do_without_what_cannot_be_saved
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.system.native import hook_library
from phosd.errors import PhosError
from phosd.service.config_values import size

PROGRAMS = Path(__file__).parent / "programs"
STATE = "phos-series"
"""The state folder, in the folder that is given for it."""
_SETTLE = 10
"""Iterations before the first checkpoint."""
_TOLD = ("mode", "incremental", "state", "memory_tier", "shadow_limit", "on_write")
"""Options that the answer repeats."""


def interpreter(ranks: int) -> list[str]:
    """Return the words that run a Python program: once, or by torchrun if there are ``ranks``."""
    by = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(by if ranks else ())]


def start(
    log: Path,
    runtime: Path,
    program: str,
    *words: str,
    hooked: bool,
    ranks: int = 0,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Training:
    """Start the program in a session of its own, with torchrun if there are ``ranks``, and with
    these ``settings`` in its environment.
    """
    environment = os.environ | {"PHOS_RUNTIME_DIR": str(runtime), **settings}
    do_without_what_cannot_be_saved(environment)
    if hooked:
        environment["LD_PRELOAD"] = str(hook_library())
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*interpreter(ranks), str(PROGRAMS / f"{program}.py"), *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    return Training(process, log)


def undisturbed(folder: Path, arguments: argparse.Namespace) -> dict[int, str]:
    """Return the output of the first ``arguments.against`` iterations of an undisturbed run."""
    if not arguments.against:
        return {}
    ranks = arguments.torchrun
    training = start(folder / "undisturbed", folder, *arguments.program, hooked=False, ranks=ranks)
    training.wait_for(arguments.against)
    training.kill()
    return {n: loss for n, loss in training.losses().items() if n < arguments.against}


def one(
    node: Node,
    training: Training,
    options: CheckpointOptions,
    between: int,
    *,
    write_back: bool = True,
) -> dict[str, Any]:
    """Make one checkpoint; return its phases, and how much longer the iterations around it took
    than the ``between`` that follow. ``drain_phase_s`` is the part of ``drain`` inside the stop. An
    image in memory is then written to the disk, with ``write_back``.
    """
    drained = 0.0

    def look(progress: Progress) -> None:
        nonlocal drained
        if progress.phases and progress.phases[-1].name == "drain":
            drained = time.monotonic()

    progress = Progress(look)
    first = training.lines()
    began = time.perf_counter()
    try:
        manifest = checkpoint(node, training.process.pid, options, progress)
    except PhosError as error:
        return {"error": str(error), "phases_s": phases(progress), "notes": progress.notes}
    seconds = time.perf_counter() - began
    durable = {}
    if node.store.memory is not None and write_back:
        node.store.write_back.write(manifest.id, Progress())
        durable = {"durable_s": time.perf_counter() - began}
    training.wait_for(2)
    during = training.iterations(first)
    quiet = training.lines()
    training.wait_for(between)
    usual = statistics.median(training.seconds(quiet))
    inside = next((p for p in progress.phases if p.name == "drain"), None)
    extra = sum(iteration.seconds - usual for iteration in during)
    return {
        "image": manifest.id,
        "mode": manifest.mode,
        "seconds": seconds,
        **durable,
        "stop_s": progress.stop_seconds,
        "phases_s": phases(progress),
        "usual_iteration_s": usual,
        "iterations_around": len(during),
        "stolen_s": extra - progress.stop_seconds,
        **spans(progress, during, drained),
        "drain_phase_s": (inside.end or 0) - inside.start if inside else None,
        "wrong_guesses": progress.wrong_guesses,
        "suspects": len(progress.suspects),
        "details": progress.figures.measured(),
        "notes": progress.notes,
        "new_bytes": new_bytes(manifest, node),
    }


def spans(
    progress: Progress, during: Sequence[Iteration], drained: float
) -> dict[str, dict[str, float] | list[float] | float]:
    """Divide the iterations around a checkpoint into those that ended before the stop, those that
    overlap stop or drain, and those that began after all chunks were copied, at ``drained``. Each
    part has the number of iterations and their seconds.

    An iteration that overlaps the drain only briefly counts fully as the drain's. ``whole_s`` are
    the seconds of those wholly inside the drain.
    """
    stops = [phase for phase in progress.phases if phase.stopped]
    closed, opened = stops[0].start, stops[-1].end or stops[-1].start
    end = max(drained, opened)
    parts: dict[str, list[float]] = {"before": [], "drain": [], "after": []}
    for iteration in during:
        if iteration.end < closed:
            parts["before"].append(iteration.seconds)
        elif iteration.end - iteration.seconds > end:
            parts["after"].append(iteration.seconds)
        else:
            parts["drain"].append(iteration.seconds)
    sums = {name: {"count": len(part), "seconds": sum(part)} for name, part in parts.items()}
    whole = [i.seconds for i in during if opened <= i.end - i.seconds and i.end <= end]
    return {**sums, "draining_s": end - opened, "whole_s": whole}


def phases(progress: Progress) -> dict[str, float]:
    """Return seconds by phase, adding up phases of the same name."""
    took: dict[str, float] = {}
    for phase in progress.phases:
        took[phase.name] = took.get(phase.name, 0.0) + (phase.end or phase.start) - phase.start
    return {name: round(seconds, 4) for name, seconds in took.items()}


def new_bytes(manifest: Manifest, node: Node) -> int:
    """Return the bytes of chunks that the parent does not have."""
    known: set[str] = set()
    if manifest.parent is not None:
        parent = node.store.get(manifest.parent)
        known = {ref.digest for block in parent.blocks for ref in block.chunks}
    new = {r.digest: r.length for b in manifest.blocks for r in b.chunks if r.digest not in known}
    return sum(new.values())


def case(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Make a series of checkpoints of one program."""
    state = Path(arguments.state) / STATE
    config = NodeConfig(
        state,
        folder / "run",
        shadow_limit=arguments.shadow_limit,
        snapshots=not arguments.on_write,
        memory_tier=size(arguments.memory_tier),
    )
    expected = undisturbed(folder, arguments)
    with Node(config) as node:
        node.movers.mover(0)
        training = start(
            *(folder / "output", config.runtime_dir, *arguments.program),
            hooked=arguments.mode != "driver",
            ranks=arguments.torchrun,
        )
        training.wait_for(_SETTLE)
        analysed = None
        if arguments.analyse:
            analysed = analyse(node, training.process.pid, arguments.analyse_seconds).row()
        at = training.lines()
        training.wait_for(_SETTLE)
        usual = statistics.median(training.seconds(at))
        began = time.perf_counter()
        results, last = checkpoints(node, training, arguments)
        wall = time.perf_counter() - began
        iterations = training.lines()
        manifest = node.store.get(last) if last else None
        stops = [result["stop_s"] for result in results if "stop_s" in result]
        answer: dict[str, object] = {
            "series": " ".join(arguments.program),
            **{name: getattr(arguments, name) for name in _TOLD},
            "analysed": analysed,
            "device_bytes": manifest.device_bytes if manifest else None,
            "blocks": len(manifest.blocks) if manifest else None,
            "free_bytes": node.movers.mover(0).free_memory()[0],
            "usual_iteration_s": usual,
            "stop_median_s": statistics.median(stops) if stops else None,
            "stop_max_s": max(stops, default=None),
            "wall_s": wall,
            "iterations": iterations,
            "checkpoints": results,
            "transparent_hugepages": hugepages(),
            "huge_pages": os.environ.get("PHOS_HUGE_PAGES", "on"),
        }
        if expected:
            training.wait_for(max(0, arguments.against - iterations))
            answer |= compared(training, expected)
        if arguments.kill and last is not None:
            cycles = [
                kill_and_restore(node, training, last, arguments.compare)
                for _ in range(arguments.kill)
            ]
            answer["restores"] = cycles
        training.kill()
        if last is not None:
            node.store.delete(last)
        return answer


def compared(training: Training, expected: Mapping[int, str]) -> dict[str, object]:
    """Compare the program's values with those of an undisturbed run."""
    losses = training.losses()
    return {
        "values_against_undisturbed": len(expected),
        "equal_to_undisturbed": all(losses[n] == value for n, value in expected.items()),
    }


def checkpoints(
    node: Node, training: Training, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], str | None]:
    """Make one checkpoint after another, of which only the last image stays. Returns what came of
    each, and that image.
    """
    results: list[dict[str, Any]] = []
    last: str | None = None
    began = time.perf_counter()
    while len(results) < arguments.count and time.perf_counter() - began < arguments.seconds:
        parent = (last or "") if arguments.incremental else ""
        if last is not None and not arguments.incremental:  # there may be no room for two
            node.store.delete(last)
            last = None
        options = CheckpointOptions(mode=arguments.mode, parent=parent, audit=arguments.audit)
        result = one(node, training, options, arguments.between, write_back=not arguments.in_memory)
        results.append(result)
        print(json.dumps(result), file=sys.stderr, flush=True)
        if "image" in result:
            if last is not None:
                node.store.delete(last)
            last = result["image"]
    return results, last


def kill_and_restore(node: Node, training: Training, image: str, count: int) -> dict[str, object]:
    """Kill the program, restore the image and compare the values from then on."""
    training.wait_for(count)
    original = training.losses()
    training.kill()
    at = training.lines()
    progress = Progress()
    result = restore(node, image, RestoreOptions(), progress)
    training.wait_for(count)
    continued = training.losses(at)
    common = original.keys() & continued.keys()
    return {
        "restore_s": result.seconds,
        "phases_s": phases(progress),
        "values_compared": len(common),
        "values_equal": all(original[n] == continued[n] for n in common),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    modes = ["concurrent", "recopy", "stop", "driver", "auto"]
    parser.add_argument("--mode", choices=modes, default="concurrent")
    parser.add_argument("--count", type=int, default=5, help="checkpoints")
    parser.add_argument("--between", type=int, default=5, help="iterations between them")
    parser.add_argument("--incremental", action="store_true", help="each the parent of the next")
    parser.add_argument("--state", default="/dev/shm", help="where the images go")
    parser.add_argument("--memory-tier", default="0", help="how much memory images may take")
    parser.add_argument("--in-memory", action="store_true", help="do not write them to the disk")
    help_of_kill = "kill, restore and compare at the end, once or TIMES"
    parser.add_argument(
        "--kill", type=int, nargs="?", const=1, default=0, metavar="TIMES", help=help_of_kill
    )
    parser.add_argument("--torchrun", type=int, default=0, metavar="RANKS")
    parser.add_argument("--compare", type=int, default=20, help="iterations to compare")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after these")
    parser.add_argument("--shadow-limit", type=int, help="bytes of shadow memory, at most")
    parser.add_argument("--on-write", action="store_true", help="no snapshots: copy on write")
    parser.add_argument("--audit", action="store_true", help="count what was saved without need")
    parser.add_argument("--analyse", action="store_true", help="what is launched, before")
    parser.add_argument(
        "--analyse-seconds", type=float, default=300.0, help="that it may take (%(default)s)"
    )
    parser.add_argument("--against", type=int, default=0, help="iterations to compare with a twin")
    parser.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as folder:
        print(json.dumps(case(arguments, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
