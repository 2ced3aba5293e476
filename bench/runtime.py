"""Measure for how long a program stands still while a container's runtime saves it.

    python -m bench.runtime [--count N] [--state DIR] [--images DIR] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``, under the hook. It is saved by CRIU as a runtime runs it, with
phosd's plugin, and let run on (``criu dump --leave-running``; the same without a container, since
runc cannot start everywhere); and, to compare with, by ``phos checkpoint``, and once in mode
``driver``, which is what cuda-checkpoint does.

``stood_s`` is the longest time between two lines that the program printed, less the usual time;
``command_s`` what the command took; ``stopped`` and ``ran`` have the seconds of the job's phases in
which the program stood still and ran, one after another. CRIU writes the host memory of the
processes to ``--images`` while the program stands still: a folder in memory tells how much of the
stop that is. At last CRIU ends the program and restores it, and it must compute on what it would
have. Prints one JSON object.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.stage import Failed, Phos, Shown, add_options, end_tree, run, wait_until, words_of
from phosd.engine.criu.run.program import Criu
from phosd.engine.system import procfs
from phosd.engine.system.native import runtime_plugins

_USUAL = 8
"""Lines by which the usual time is known."""


def _ends(shown: Shown, since: int = 0) -> list[float]:
    """Return when each iteration ended, in seconds of the program's clock."""
    return [float(words[3]) for words in shown.lines(since) if len(words) == 4]


def _await(shown: Shown, more: int) -> None:
    goal = len(shown.steps()) + more
    wait_until(lambda: len(shown.steps()) >= goal, f"{more} iterations")


def _around(phos: Phos, shown: Shown, command: Callable[[], object]) -> dict[str, Any]:
    """Run a command beside the program, which has phosd do a job."""
    _await(shown, _USUAL)
    first = len(shown.lines()) - _USUAL
    began = time.monotonic()
    command()
    took = time.monotonic() - began
    job = _last_job(phos)
    _await(shown, 3)
    if job["operation"] == "checkpoint" and job["result"]:
        phos.do("rm", job["result"])  # one image at a time: they may be as large as the disk
    ends = _ends(shown, first)
    between = [later - earlier for earlier, later in pairwise(ends)]
    usual = statistics.median(between)
    return {
        "command_s": round(took, 3),
        "usual_s": round(usual, 4),
        "stood_s": round(max(between) - usual, 3),
        **_phases(job),
    }


def _last_job(phos: Phos) -> dict[str, Any]:
    number = max(int(job["job"]) for job in phos.do("jobs"))
    (job,) = phos.do("jobs", str(number))
    return job


def _phases(job: dict[str, Any]) -> dict[str, Any]:
    """Return the mode of a job, and the seconds of its phases."""
    told: dict[str, list[tuple[str, float]]] = {"stopped": [], "ran": []}
    for phase in job["phases"]:
        found = told["stopped" if phase["stopped"] else "ran"]
        found.append((phase["name"], round(phase["seconds"], 4)))
    return {"mode": job["mode"], **told}


class _Runtime:
    """CRIU, with the options of a runtime. Its folder is where the images are to be."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = os.environ | environment

    def dump(self, pid: int, name: str, *words: str) -> Path:
        """Save a tree; return the folder of the image."""
        images = self._folder / name
        images.mkdir()
        self._run(images, "dump", "--tree", str(pid), *words)
        return images

    def restore(self, images: Path) -> None:
        self._run(images, "restore", "--restore-detached")

    def _run(self, images: Path, action: str, *words: str) -> None:
        done = subprocess.run(
            [Criu.find().path, action, "--images-dir", images, "--log-file", f"{action}.log",
             "--libdir", runtime_plugins(), "--tcp-established", "--ext-unix-sk", "--file-locks",
             "--timeout", "120", "-v4", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            log = images / f"{action}.log"
            said = log.read_text(errors="replace")[-6000:] if log.exists() else ""
            raise Failed(f"criu {action} failed: {done.stderr}{said}")


def measure(arguments: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Fill the report."""
    report |= {"by_runtime": [], "by_phosd": [], "by_driver": []}
    settings = f'memory_tier = "{arguments.memory_tier}"\n'
    with ExitStack() as stack, Phos(folder, folder / "state", settings) as phos:
        pid, output = phos.run(words_of(arguments.program))
        shown = Shown(output)
        images = stack.enter_context(
            TemporaryDirectory(prefix="phos-", dir=arguments.images or folder)
        )
        runtime = _Runtime(Path(images), phos.environment)
        try:
            for number in range(arguments.count):
                ways: dict[str, Callable[[], object]] = {
                    "by_phosd": partial(phos.do, "checkpoint", str(pid)),
                    "by_runtime": partial(runtime.dump, pid, str(number), "--leave-running"),
                }
                for way, command in ways.items():
                    report[way].append(_around(phos, shown, command))
                shutil.rmtree(Path(images, str(number)))
            by_driver = partial(phos.do, "checkpoint", str(pid), "--mode", "driver")
            report["by_driver"].append(_around(phos, shown, by_driver))
            last = runtime.dump(pid, "last")
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the pid to be free")
            began = time.monotonic()
            runtime.restore(last)
            report["restore_s"] = round(time.monotonic() - began, 3)
            _await(shown, 3)
        finally:
            if procfs.process_id(pid) is not None:
                end_tree(pid)
        numbers = [step.number for step in shown.steps()]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise Failed("the restored program did not go on where it was")


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--images", type=Path, help="where CRIU's go; default: below STATE")
    add_options(parser)
    run(measure, parser.parse_args(), {})


if __name__ == "__main__":
    main()
