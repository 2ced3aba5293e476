"""Kill a program again and again a while after it was saved, and compare its values.

    python -m bench.crashed NAME [--times N] [--seed S] [--within SECONDS] [--path FOLDER]
        [--state DIR] [--keep-files DIR]

NAME is one of ``bench.matrix``. It runs by the line ``phos run --name NAME --resume
--on-term=save``: saved at a random instant within SECONDS of its first step after each start, and
killed with its whole tree within SECONDS of that, at a random instant, too, having written to its
files meanwhile. Each time the line must exit with 137, and go on from the image when it is run
again, with the files as they were. Every step that was printed must have the value of an
undisturbed run, also when it was printed twice, and none may be missing.

Prints one JSON object, and each round by itself on the standard error. The exit code is 1 if
anything is not as it must be.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.checkpoint import kill_tree
from bench.entries import ENTRIES, Entry
from bench.matrix import words_of
from bench.preempted import Line, exit_of
from bench.stage import (
    KEPT,
    Failed,
    Phos,
    Shown,
    Step,
    figures,
    judged,
    start_undisturbed,
)

_BROUGHT_BACK = (" is cut to its length", " is put back")
"""What a restore says of a file that it brings back."""


def crash(line: Line, relay: "subprocess.Popen[bytes]") -> None:
    """Kill the program with its tree, and wait until the line has exited."""
    if (program := line.program()) is None:
        raise Failed(f"the program has ended by itself, and the line with {relay.poll()}")
    kill_tree(program)
    code = exit_of(relay, "the kill")
    if code != 128 + signal.SIGKILL:
        raise Failed(f"after the kill the line exited with {code}")


def play(line: Line, phos: Phos, arguments: argparse.Namespace, rounds: list[Any]) -> None:
    """Save the program, kill it and go on, again and again. What is measured goes to ``rounds``."""
    chance = random.Random(arguments.seed)
    for number in range(arguments.times + 1):
        at, began = len(line.shown.lines()), time.monotonic()
        with line.running() as relay:
            line.wait_for_a_step(relay, at)
            if rounds:
                rounds[-1]["resume_to_next_step_s"] = round(time.monotonic() - began, 3)
                print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
            if number == arguments.times:
                time.sleep(arguments.within)
                return
            time.sleep(chance.uniform(0.0, arguments.within))
            image = str(phos.do("checkpoint", arguments.name)[-1]["result"])
            saved = len(line.shown.lines())
            time.sleep(chance.uniform(0.0, arguments.within))
            crash(line, relay)
        lost = len(line.shown.steps(saved))
        job = phos.job_of(image)
        rounds.append({"lost_steps": lost, "notes": job["notes"], **figures(job)})


def compare(found: Sequence[Step], expected: Sequence[Step]) -> int:
    """Return how many steps were printed twice. Raises :class:`Failed` if one is missing, or has
    another value than the undisturbed run's.
    """
    values = dict(expected)
    for step in found:
        if values.get(step.number) != step.value:
            theirs = values.get(step.number)
            raise Failed(f"printed {step}, where the undisturbed run printed {theirs}")
    numbers = {step.number for step in found}
    if missing := set(range(max(numbers, default=0) + 1)) - numbers:
        raise Failed(f"has not printed step {min(missing)}, nor {len(missing) - 1} others")
    return len(found) - len(numbers)


def undisturbed(words: Sequence[str], output: Path, last: int) -> list[Step]:
    """Run the program without the hook and without phosd up to a step; return its steps."""
    process = start_undisturbed(words, output)
    shown = Shown(output)
    try:
        shown.follow(
            lambda: process.poll() is not None or len(shown.steps()) > last, "the undisturbed run"
        )
    finally:
        kill_tree(process.pid)
        process.wait()
    return shown.steps()


def measure(arguments: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Run the program with its crashes and undisturbed; fill the report."""
    entry: Entry = ENTRIES[arguments.name]
    path = os.pathsep.join([*arguments.path, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**entry.environment, "PYTHONPATH": path}
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), *words_of(entry)]
    options = [word for kept in arguments.keep_files for word in ("--keep-files", kept)]
    settings = f"[[limits]]\nkeep = {KEPT}\n"
    with Phos(folder, folder / "state", settings) as phos:
        line = Line(phos, words, folder, *options, name=arguments.name)
        play(line, phos, arguments, report["rounds"])
        restores = phos.do("history", "--operation", "restore", "--limit", "1000")
    report["files_brought_back"] = sum(
        each["notes"].count(said) for each in restores for said in _BROUGHT_BACK
    )
    found = line.shown.steps()
    expected = undisturbed(words, folder / "undisturbed.out", max(step.number for step in found))
    report["printed_twice"] = compare(found, expected)
    report["values_equal"] = len(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(ENTRIES), metavar="NAME")
    parser.add_argument("--times", type=int, default=10, help="crashes (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the instants (%(default)s)")
    parser.add_argument("--within", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--path", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--state", type=Path, default=Path("/var/tmp"), help="where images go")
    parser.add_argument("--keep-files", action="append", default=[], metavar="DIR")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"name": arguments.name, "seed": arguments.seed, "rounds": []}
    with judged(arguments.state, report) as folder:
        measure(arguments, folder, report)
    print(json.dumps(report), flush=True)
    sys.exit(1 if "failed" in report else 0)


if __name__ == "__main__":
    main()
