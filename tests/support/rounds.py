"""Play long plans of test runs round by round, continuing where an earlier call ended.

``python -m tests.support.rounds flake-hunt`` runs the native tests and the modules most sensitive
to timing (``tests/timing-modules.txt``) 30 times, together and beside two busy loops, and
everything else twice.
``... soak`` plays tests that take hours. Each round adds a line of JSON to ``build/PLAN.jsonl``:
the commit, the round, its result, its seconds, and the failures. Rounds of this commit in that file
are not repeated. Exits with 1 when any of them has failed. ``--only NAME`` plays those whose names
begin so.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.rotation import TESTS

ROOT = TESTS.parent
TIMING_MODULES = TESTS / "timing-modules.txt"
CORES = os.cpu_count() or 1
AGAIN_AND_AGAIN = (
    *(f"tests/node/checkpoint_restore/test_{name}.py" for name in ("ring", "polling", "held")),
    "tests/system/containers",
    "tests/system/service/test_crashes.py",
    "tests/system/faults/test_files.py",
    "tests/native/analysis/test_oracle.py",
    "tests/long/test_tui_memory.py",
    "tests/long/test_exchanges.py",
    "tests/system/service/test_random_pools.py",
)
"""What ask :func:`~tests.support.rotation.times` how often."""
_PYTEST = (
    sys.executable,
    "tests/support/reaper.py",
    sys.executable,
    "-m",
    "pytest",
    "--quiet",
    "-ra",
)


@dataclass(frozen=True)
class Round:
    """Commands of a plan that run at the same time, with their name in the record."""

    name: str
    commands: Sequence[Sequence[str]]
    environment: dict[str, str] = field(default_factory=dict)
    busy: bool = False
    """Whether two busy loops run beside them."""

    def run(self) -> tuple[bool, str]:
        """Run the commands until all have ended. Returns whether all passed, and what they said."""
        loops = busy_loops(2 if self.busy else 0)
        with loops, ThreadPoolExecutor(len(self.commands)) as pool:
            done = list(pool.map(self._run, self.commands))
        return all(each.returncode == 0 for each in done), "".join(each.stdout for each in done)

    def _run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )


def _tests(*arguments: str) -> tuple[str, ...]:
    return (*_PYTEST, f"--isolated={CORES + 1}", *arguments)


def flake_hunt() -> Iterator[Round]:
    """Yield all tests that may fail on a busy machine, repeatedly."""
    timing = TIMING_MODULES.read_text().split()
    native = [".venv/bin/ctest", "--test-dir", "build/native", f"--parallel={CORES}"]
    native += ["--output-on-failure", "--no-tests=error"]
    for number in range(1, 31):
        seed = {"PHOS_TEST_SEED": str(number)}
        yield Round(f"native and timing {number}", [native, _tests(*timing)], seed, busy=True)
        if number in (10, 20):
            ignored = [f"--ignore={module}" for module in timing]
            others = _tests("-m", "not timing", *ignored)
            yield Round(f"others {number // 10}", [others], seed, busy=True)
            yield Round(f"alone {number // 10}", [(*_PYTEST, "-m", "timing")], seed, busy=True)


def soak() -> Iterator[Round]:
    """Yield what is done again and again, random programs, random moves, changed images, random
    kills (500), checkpoints whose steps are delayed (2,000), changed files of CRIU (10,000) and
    thousands of jobs.
    """
    yield Round(
        "again and again",
        [_tests(*AGAIN_AND_AGAIN)],
        {"PHOS_TEST_ALL": "1", "PHOS_TEST_SOAK": "1"},
    )
    faults = [f"tests/system/faults/test_{name}.py" for name in ("kills", "delays")]
    for number in range(1, 101):
        if number % 6 == 1:
            # Three at a time, since most of a delay is waiting.
            seeds = (f"PHOS_TEST_SEED={3000 + number + each}" for each in range(3))
            yield Round(
                f"kills and delays {number // 6 + 1}",
                [("env", seed, *_tests(*faults)) for seed in seeds],
                {"PHOS_TEST_ALL": "1"},
                busy=True,
            )
        yield Round(
            f"random {number}",
            [_tests("-k", "test_random_programs or test_walk")],
            {"PHOS_TEST_ALL": "1", "PHOS_TEST_SEED": str(1000 + number)},
        )
        if number % 10 == 1:
            yield Round(
                f"changed files of CRIU {number // 10}",
                [_tests("tests/node/criu/test_image_fuzz.py")],
                {"PHOS_TEST_ALL": "1", "PHOS_TEST_SOAK": "1", "PHOS_TEST_SEED": str(4000 + number)},
            )
            yield Round(
                f"changed images {number // 10}",
                [_tests("-k", "test_changed_images")],
                {"PHOS_TEST_ALL": "1", "PHOS_TEST_SEED": str(2000 + number)},
            )
            yield Round(f"jobs {number // 10}", [(sys.executable, "-m", "bench.soak")])


PLANS = {"flake-hunt": flake_hunt, "soak": soak}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run ``count`` busy loops until the end of the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def commit() -> str:
    """Return the commit under test, marked when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def play(rounds: Iterator[Round], record: Path, end: float) -> bool:
    """Play the rounds that are not in the record, until ``end`` (monotonic clock). Returns whether
    none has failed.
    """
    head = commit()
    lines = record.read_text().splitlines() if record.exists() else []
    known = {each["round"]: each for each in map(json.loads, lines) if each["commit"] == head}
    failed = [name for name, each in known.items() if not each["passed"]]
    for number, each in enumerate(rounds):
        if each.name in known:
            continue
        if time.monotonic() > end:
            print(f"the time is over before round {number} ({each.name}); call again to go on")
            break
        began = time.monotonic()
        passed, output = each.run()
        said = output.splitlines()
        row = {
            "commit": head,
            "round": each.name,
            "passed": passed,
            "seconds": round(time.monotonic() - began, 1),
            "failures": [line for line in said if line.startswith(("FAILED", "ERROR"))],
            "end": said[-1] if said else "",
        }
        with record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{each.name}: {'passed' if passed else 'FAILED'}, {row['seconds']} s, {row['end']}")
        if not passed:
            failed.append(each.name)
            log = record.with_name(f"{record.stem}-{each.name.replace(' ', '-')}.log")
            log.write_text(output)
            print(f"  what it said: {log}")
    print(f"failed: {', '.join(failed)}" if failed else "nothing has failed")
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--only", default="", help="rounds whose names begin so")
    parser.add_argument("--minutes", type=float, default=120, help="begin no round after these")
    options = parser.parse_args()
    record = ROOT / "build" / f"{options.plan}.jsonl"
    record.parent.mkdir(exist_ok=True)
    rounds = (each for each in PLANS[options.plan]() if each.name.startswith(options.only))
    passed = play(rounds, record, time.monotonic() + 60 * options.minutes)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
