"""Let a program save itself while others ask for checkpoints, kill it, and restore it.

    python -m bench.own_checkpoints [--every STEPS] [--steps N] [--asked TIMES]
        [--state DIR] [--memory-tier SIZE] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs`` that takes ``--steps`` and ``--save-every`` (``finetuned``,
``recurrence``). It runs once by itself, and once under ``phos run``, where it saves itself each
STEPS steps. TIMES times ``phos checkpoint`` asks for an image, too, which must be made at a safe
point. Then the program is killed, the newest image restored, and the program runs to its end. Every
step must have been printed with the value of the undisturbed run.

Prints one JSON object: the seconds that the program waited in each checkpoint of its own and that
each command took, the seconds of each stop, and how often phosd called the program. The exit code
is 1 if anything is not as it must be.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoint import gone
from bench.stage import (
    KEPT,
    Failed,
    Phos,
    Shown,
    Step,
    add_options,
    end_tree,
    figures,
    run,
    undisturbed,
    wait_until,
    words_of,
)
from phosd.errors import NoSuchProcess

_ON = 3
"""Steps that the program goes on after its last own checkpoint, before it is killed."""


class Program:
    """The running program, and what it has printed."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid = pid
        self.shown = Shown(output)

    def wait_for_own(self, more: int) -> int:
        """Wait until the program has saved itself once more, and for as many steps after that.
        Return the number of the line that tells of the checkpoint.
        """
        at = len(self.shown.lines())
        wait_until(lambda: self._own_since(at) or self._ended(), "the program to save itself")
        if not (line := self._own_since(at)):
            raise Failed("the program has ended: give more --steps, or look at its output")
        wait_until(
            lambda: len(self.shown.steps(line)) >= more or self._ended(), f"{more} more steps"
        )
        return line

    def kill(self) -> None:
        """Kill it with its process tree, and wait until the pids are free."""
        end_tree(self.pid)

    def _own_since(self, at: int) -> int | None:
        """Return the number of the first line after line ``at`` that tells of a checkpoint."""
        told = (n for n, words in enumerate(self.shown.lines()) if words[:2] == ["own", "saved"])
        return next((n for n in told if n >= at), None)

    def _ended(self) -> bool:
        return gone((self.pid,))


@contextlib.contextmanager
def started(phos: Phos, words: Sequence[str]) -> Iterator[Program]:
    """Run the program, and leave nothing of it behind."""
    program = Program(*phos.run(words))
    try:
        yield program
    finally:
        with contextlib.suppress(NoSuchProcess):
            program.kill()


def ask(phos: Phos, program: Program) -> dict[str, Any]:
    """Ask for a checkpoint, and see that it was made at a safe point."""
    since = program.wait_for_own(1)
    began = time.monotonic()
    job = phos.do("checkpoint", str(program.pid), "--queue")[-1]
    seconds = time.monotonic() - began
    if not program.shown.told("before", since):
        raise Failed(f"image {job['result']} was made without a safe point")
    measured = figures(phos.job_of(job["result"]))
    if "safe-point" not in measured["phases_s"]:
        raise Failed(f"nobody waited for a safe point for image {job['result']}")
    return {"image": job["result"], "seconds": round(seconds, 3), **measured}


def require_equal(found: Sequence[Step], expected: Sequence[Step], last: Sequence[Step]) -> None:
    """Raise :class:`Failed` unless all values are those of the undisturbed run, and the restored
    program has printed the ``last`` steps without a gap, up to the end.
    """
    values = dict(expected)
    for step in found:
        if values.get(step.number) != step.value:
            raise Failed(f"printed {step}, where {values.get(step.number)} is right")
    if not last or list(last) != list(expected[last[0].number :]):
        raise Failed(f"restored, it has printed {len(last)} steps, and not each up to the end")
    if missing := values.keys() - {step.number for step in found}:
        raise Failed(f"{len(missing)} steps are missing, from {min(missing)} on")


def own_checkpoints(phos: Phos, shown: Shown, asked: set[str]) -> dict[str, Any]:
    """Return what is known of the program's own checkpoints. Those that met one of the images that
    others ``asked`` for share it, and have no job of their own.
    """
    waited = [float(seconds) for outcome, seconds in shown.told("own") if outcome == "saved"]
    jobs = [job for job in reversed(phos.checkpoints()) if job["result"] not in asked]
    shared = len(waited) - len(jobs)
    if not 0 <= shared <= len(asked):
        raise Failed(f"the program was saved {len(waited)} times as it asked, by {len(jobs)} jobs")
    return {
        "seconds": [round(seconds, 3) for seconds in waited],
        "shared": shared,
        "jobs": [figures(job) for job in jobs],
    }


def measure(arguments: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Run the program undisturbed, and saved, killed and restored; fill the report."""
    more = ("--steps", str(arguments.steps), "--save-every", str(arguments.every))
    words = words_of(arguments.program, *more)
    expected = undisturbed(words, folder / "undisturbed.out")
    settings = f'memory_tier = "{arguments.memory_tier}"\n[[limits]]\nkeep = {KEPT}\n'
    with Phos(folder, folder / "state", settings) as phos, started(phos, words) as program:
        shown = program.shown
        for _ in range(arguments.asked):
            report["asked"].append(each := ask(phos, program))
            print(json.dumps(each), file=sys.stderr, flush=True)
        program.wait_for_own(_ON)
        program.kill()
        at = len(shown.lines())
        image = phos.do("images")[-1]
        began = time.monotonic()
        phos.do("restore", image["id"])
        wait_until(lambda: shown.steps(at), "the restored program's first step")
        report["restore_to_next_step_s"] = round(time.monotonic() - began, 3)
        shown.follow(lambda: gone((program.pid,)), "the end of the program")
        names = ("total_bytes", "device_bytes", "stored_bytes")
        report["image"] = {name: image[name] for name in names}
        require_equal(shown.steps(), expected, shown.steps(at))
        outcomes = [outcome for outcome, _ in shown.told("own", at)]
        if outcomes[:1] != ["restored"] or "restored" in outcomes[1:]:
            raise Failed(f"checkpoint() of the restored program returned {outcomes[:2]}")
        if not (end := shown.told("end", at)):
            raise Failed("the program has not come to its end")
        before, after, restored = map(int, end[0])
        report["called"] = {"before": before, "after": after, "restored": restored}
        if restored != 1 or before != after + restored:
            raise Failed(f"phosd has not called the program as often after as before: {end[0]}")
        images = {each["image"] for each in report["asked"]}
        report["own"] = own_checkpoints(phos, shown, images)
    report["values_equal"] = len(expected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of the program (%(default)s)")
    parser.add_argument("--asked", type=int, default=3, metavar="TIMES", help="(%(default)s)")
    add_options(parser)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "every": arguments.every,
        "steps": arguments.steps,
        "asked": [],
    }
    run(measure, arguments, report)


if __name__ == "__main__":
    main()
