"""Measure how long a program waits for the GPU beside another's long kernels, once it was saved.

    python -m bench.preemption [--how nothing driver-alone stop] [--kernel MS] [--seconds S]

Starts a program of kernels of MS milliseconds each (``bench/programs/long_kernel.py``) and beside
it one that launches empty kernels (``empty_kernel.py``), and lets them run for S seconds before and
S seconds after the first was checkpointed: by the driver alone (without hook, without phosd), or by
phosd. A GPU that takes turns between contexts lets the empty kernel wait for a time slice; one that
cannot interrupt the long kernel lets it wait for its end. Prints one JSON object for each way.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.neighbours import by_driver_alone, by_phosd
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.system.native import hook_library

_PROGRAMS = Path(__file__).parent / "programs"
_START_SECONDS = 60.0


@contextmanager
def running(program: str, output: Path, *words: str, **environment: str) -> Iterator[int]:
    """Run a program until it has printed something. Yields its pid; ends it at the end."""
    with output.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, str(_PROGRAMS / program), *words],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + _START_SECONDS
        while not output.stat().st_size:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{program} did not begin")
            time.sleep(0.1)
        yield process.pid
        if process.poll() is not None:
            raise RuntimeError(f"{program} ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def waits(output: Path, seconds: float) -> dict[str, float]:
    """Return the empty kernels of the next seconds: their number, median and longest, in ms."""
    before = len(output.read_text().splitlines())
    time.sleep(seconds)
    took = sorted(float(line) for line in output.read_text().splitlines()[before:-1])
    return {"kernels": len(took), "p50": took[len(took) // 2], "longest": took[-1]}


def measure(way: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the result of one way."""
    with tempfile.TemporaryDirectory(prefix="phos-", dir="/var/tmp") as name:
        place = Path(name)
        hooked = {"LD_PRELOAD": str(hook_library()), "PHOS_RUNTIME_DIR": str(place / "run")}
        output = place / "waits"
        with (
            Node(NodeConfig(state_dir=place / "state", runtime_dir=place / "run")) as node,
            running(
                "long_kernel.py",
                place / "long",
                str(arguments.kernel),
                **hooked if way == "stop" else {},
            ) as pid,
            running("empty_kernel.py", output),
        ):
            before = waits(output, arguments.seconds)
            if way != "nothing":
                save = by_driver_alone if way == "driver-alone" else by_phosd(node, way)
                save(pid)
            after = waits(output, arguments.seconds)
    return {"way": way, "kernel_ms": arguments.kernel, "before_ms": before, "after_ms": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = ("nothing", "driver-alone", "stop")
    parser.add_argument("--how", nargs="+", choices=ways, default=list(ways))
    parser.add_argument("--kernel", type=float, default=300, help="milliseconds of each kernel")
    parser.add_argument("--seconds", type=float, default=5)
    arguments = parser.parse_args()
    for way in arguments.how:
        print(json.dumps(measure(way, arguments)), flush=True)


if __name__ == "__main__":
    main()
