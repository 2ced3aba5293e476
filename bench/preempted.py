"""Preempt a program again and again, and compare its values with those of an undisturbed run.

    python -m bench.preempted [--times N] [--steps N] [--seed S] [--within SECONDS]
        [--kill relay|all|program|turns] [--state DIR] [--memory-tier SIZE] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs`` that takes ``--steps`` (``finetuned``, ``gpt2``,
``recurrence``). It runs once by itself, and once by the line ``phos run --name bench --resume
--on-term=save``: SIGTERM comes within SECONDS of the first step after each start, at a random
instant, to ``phos run`` (``relay``), to it and all processes of the program, as from systemd
(``all``), or to the program's first process, by turns unless ``--kill`` says which. Each time the
line must exit with 75, and go on when it is run again. At the end every step must have been printed
once, with the same value.

Prints one JSON object, and each round by itself on the standard error. The exit code is 1 if
anything is not as it must be.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoint import kill_tree
from bench.ending import rate
from bench.stage import (
    KEPT,
    PATIENCE,
    Failed,
    Phos,
    Shown,
    Step,
    add_options,
    figures,
    run,
    undisturbed,
    wait_until,
    words_of,
)
from phosd.cli.run_command.relay import SAVED
from phosd.engine.program.name import name_of
from phosd.engine.program.tree import scan
from phosd.errors import NoSuchProcess

NAME = "bench"


class Line:
    """The line that starts the program or goes on with it, and what it has shown so far."""

    def __init__(
        self, phos: Phos, words: Sequence[str], folder: Path, *options: str, name: str = NAME
    ) -> None:
        self._name = name
        run = ("run", "--name", name, "--resume", "--on-term=save", *options, "--", *words)
        self._command = phos.command(*run)
        self._environment = phos.environment
        self._out, self._err = folder / "line.out", folder / "line.err"
        self.shown = Shown(self._out)

    def start(self) -> "subprocess.Popen[bytes]":
        """Run it, in the background."""
        with self._out.open("ab") as out, self._err.open("ab") as err:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment,
                start_new_session=True,
            )

    def said(self) -> str:
        """Return what the line itself has said, and the program on its standard error."""
        return self._err.read_text() if self._err.exists() else ""

    def program(self) -> int | None:
        """Return the first process of the program, by what the line has said last."""
        told = re.findall(r"^phos: .*process (\d+)(?:;|$)", self.said(), re.MULTILINE)
        pid = int(told[-1]) if told else 0
        return pid if pid and name_of(pid) == self._name else None

    def wait_for_a_step(self, relay: "subprocess.Popen[bytes]", since: int) -> None:
        """Wait for the first step from line ``since`` on."""
        wait_until(lambda: self.shown.steps(since) or relay.poll() is not None, "the next step")
        if not self.shown.steps(since):
            raise Failed(f"the line exited with {relay.returncode} before a step was printed")

    @contextlib.contextmanager
    def running(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run it, and leave nothing of it behind."""
        relay = self.start()
        try:
            yield relay
        finally:
            if relay.poll() is None:
                relay.kill()
                relay.wait()
            if (pid := self.program()) is not None:
                with contextlib.suppress(NoSuchProcess):
                    kill_tree(pid)


def exit_of(relay: "subprocess.Popen[bytes]", after: str) -> int:
    """Wait until the line has exited, and return its code; ``after`` says what has happened."""
    try:
        return relay.wait(PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"the line has not exited {PATIENCE:.0f} s after {after}") from error


def preempt(line: Line, relay: "subprocess.Popen[bytes]", way: str) -> float:
    """Send SIGTERM, and wait until the line has exited; return the seconds."""
    if (program := line.program()) is None:
        raise Failed(f"the program has ended by itself, with {relay.poll()}: give more --steps")
    began = time.monotonic()
    pids = {
        "relay": [relay.pid],
        "program": [program],
        "all": [*(each.pid for each in scan(program).living), relay.pid],
    }
    for pid in pids[way]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    code = exit_of(relay, "SIGTERM")
    if code != SAVED:
        hint = "; it had ended by itself: give more --steps" if code == 0 else ""
        raise Failed(f"after SIGTERM ({way}) the line exited with {code}, not {SAVED}{hint}")
    return time.monotonic() - began


def play(
    line: Line, phos: Phos, arguments: argparse.Namespace, rounds: list[dict[str, Any]]
) -> None:
    """Preempt the program and go on, again and again, and let it come to its end. What is measured
    goes to ``rounds``.
    """
    chance = random.Random(arguments.seed)
    ways = ["relay", "all", "program"] if arguments.kill == "turns" else [arguments.kill]
    for number in range(arguments.times + 1):
        at, began = len(line.shown.lines()), time.monotonic()
        with line.running() as relay:
            line.wait_for_a_step(relay, at)
            if rounds:
                rounds[-1]["resume_to_next_step_s"] = round(time.monotonic() - began, 3)
                print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
            if number == arguments.times:
                to_the_end(line, relay)
                return
            instant, way = chance.uniform(0.0, arguments.within), ways[number % len(ways)]
            time.sleep(instant)
            seconds = preempt(line, relay, way)
        image = phos.do("images")[-1]
        if image["number"] != number + 1:
            raise Failed(f"the newest image is {NAME}@{image['number']}, not @{number + 1}")
        sizes = {name: image[name] for name in ("total_bytes", "device_bytes", "stored_bytes")}
        rounds.append(
            {
                "kill": way,
                "instant_s": round(instant, 3),
                "steps": len(line.shown.steps(at)),
                "sigterm_to_exit_s": round(seconds, 3),
                **figures(phos.job_of(image["id"])),
                **sizes,
            }
        )


def to_the_end(line: Line, relay: "subprocess.Popen[bytes]") -> None:
    """Wait until the program has ended by itself."""
    line.shown.follow(lambda: relay.poll() is not None, "the end of the program")
    if relay.returncode:
        raise Failed(f"at its end the line exited with {relay.returncode}, not 0")


def compare(found: Sequence[Step], expected: Sequence[Step]) -> None:
    """Raise :class:`Failed` unless both have the same steps, each once, with the same values."""
    for ours, theirs in zip(found, expected, strict=False):
        if ours != theirs:
            raise Failed(f"printed {ours}, where the undisturbed run printed {theirs}")
    if len(found) != len(expected):
        raise Failed(f"printed {len(found)} steps, and the undisturbed run {len(expected)}")


def measure(arguments: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Run the program undisturbed and preempted; fill the report."""
    words = words_of(arguments.program, "--steps", str(arguments.steps))
    report["disk_gb_per_s"] = round(rate(folder), 2)
    began = time.monotonic()
    expected = undisturbed(words, folder / "undisturbed.out")
    report["undisturbed_s"] = round(time.monotonic() - began, 1)
    settings = f'memory_tier = "{arguments.memory_tier}"\n[[limits]]\nkeep = {KEPT}\n'
    with Phos(folder, folder / "state", settings) as phos:
        line = Line(phos, words, folder)
        began = time.monotonic()
        play(line, phos, arguments, report["rounds"])
        report["preempted_s"] = round(time.monotonic() - began, 1)
        compare(line.shown.steps(), expected)
    report["values_equal"] = len(expected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10, help="preemptions (%(default)s)")
    parser.add_argument("--steps", type=int, default=1200, help="of the program (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the instants (%(default)s)")
    parser.add_argument("--within", type=float, default=1.0, metavar="SECONDS")
    ways = ("relay", "all", "program", "turns")
    parser.add_argument("--kill", choices=ways, default="turns", help="who gets SIGTERM")
    add_options(parser)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "steps": arguments.steps,
        "seed": arguments.seed,
        "rounds": [],
    }
    run(measure, arguments, report)


if __name__ == "__main__":
    main()
