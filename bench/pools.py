"""Measure starts from a pool, over D-Bus, as a program that serves requests would ask for them.

    python -m bench.pools [--count N] [--hollow N] [--ready N] [--against N] [--neighbour]
        [--memory-tier SIZE] [--state DIR] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``, deterministic. It is saved into memory and ended, and a pool
is made of the image. ``call_s`` is from the call until its job has ended, ``output_s`` until the
program has printed something. Each that is started prints what an undisturbed run prints, and is
ended. With ``--neighbour`` one that was started before computes beside them. Prints a JSON object.
"""

import argparse
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.one_program import parser, run
from bench.stage import Failed, Phos, Shown, start_undisturbed, wait_until, words_of
from bench.starts import Growth, spread
from phosd.client import Client

_LINES = 5
"""Lines of output before it is saved."""
_NAME = "bench"

Row = dict[str, Any]


def expected(words: list[str], folder: Path, count: int) -> dict[int, str]:
    """Return the first values of an undisturbed run."""
    output = folder / "undisturbed"
    process = start_undisturbed(words, output)
    try:
        wait_until(lambda: len(Shown(output).steps()) >= count, "the undisturbed run")
    finally:
        process.kill()
        process.wait()
    return {step.number: step.value for step in Shown(output).steps()[:count]}


def started(client: Client, folder: Path, *running: Path) -> tuple[Row, int, Path]:
    """Start one; return what it took, its pid, and its output. Others are ``running``, with these
    outputs.
    """
    paths = {*folder.glob(f"*.clone-{_NAME}-*")} - {*running}
    with ExitStack() as watching:
        outputs = {path: watching.enter_context(Growth(path)) for path in paths}
        began = time.monotonic()
        job = client.start_pooled(_NAME).wait()
        took = time.monotonic() - began

        def first() -> tuple[Path, float] | None:
            found = ((path, each.since(began)) for path, each in outputs.items())
            return next(((path, after) for path, after in found if after is not None), None)

        output, after = wait_until(first, "its output")
        phases = {phase.name: round(phase.seconds, 4) for phase in job.phases}
        row = {"call_s": took, "output_s": after, "from": job.mode, "phases_s": phases}
        return row, int(job.result), output


def ended(pid: int, output: Path, values: dict[int, str]) -> int:
    """Wait until all values that are compared are printed, and end it; how many are right?"""
    last = max(values)
    wait_until(lambda: any(step.number >= last for step in Shown(output).steps()), "its values")
    os.kill(pid, signal.SIGKILL)
    found = {step.number: step.value for step in Shown(output).steps()}
    if wrong := [n for n, value in values.items() if found.get(n) != value]:
        raise Failed(f"{output.name}: value {wrong[0]} is wrong")
    return len(values)


def case(arguments: argparse.Namespace, folder: Path) -> Row:
    """Run everything with one program."""
    words = words_of(arguments.program)
    values = expected(words, folder, arguments.against)
    settings = f'memory_tier = "{arguments.memory_tier}"\n'
    rows: list[Row] = []
    with Phos(folder, folder / "state", settings) as phos:
        pid, output = phos.run(words)
        wait_until(lambda: len(Shown(output).steps()) >= _LINES, "its first lines")
        image = phos.do("checkpoint", str(pid), "--end")[-1]["result"]
        size = phos.do("images", image)[-1]["device_bytes"]
        with Client(phos.environment["PHOS_BUS"]) as client:
            wanted = arguments.hollow + arguments.ready
            client.create_pool(
                _NAME, image, hollow=arguments.hollow, ready=arguments.ready, max=wanted + 4
            )

            def filled() -> bool:
                (pool,) = client.pools()
                if pool.trouble:
                    raise Failed(pool.trouble)
                return bool(pool.waiting == wanted and pool.waiting_ready == arguments.ready)

            wait_until(filled, "the pool to be filled")
            beside = started(client, output.parent) if arguments.neighbour else None
            for _ in range(arguments.count):
                wait_until(filled, "the pool to be filled")
                row, of, where = started(client, output.parent, *(beside[2:] if beside else ()))
                rows.append(row | {"values_equal": ended(of, where, values)})
            if beside is not None:
                ended(*beside[1:], values)
            client.remove_pool(_NAME)
    return {
        "pools": " ".join(arguments.program),
        "device_bytes": size,
        "neighbour": arguments.neighbour,
        "values": len(values),
        "call_s": spread([row["call_s"] for row in rows]),
        "output_s": spread([row["output_s"] for row in rows]),
        "from": sorted({row["from"] for row in rows}),
        "rows": rows,
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--count", type=int, default=10)
    made.add_argument("--hollow", type=int, default=2, help="that wait (%(default)s)")
    made.add_argument("--ready", type=int, default=0, help="more of them, ready (%(default)s)")
    made.add_argument("--neighbour", action="store_true")
    run(made, case)


if __name__ == "__main__":
    main()
