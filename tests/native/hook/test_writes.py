"""What the hook predicts of each submission, and what the software GPU then writes.

A recorder stands where copy-on-write is (phosd/hook/tests/recorder.cpp). A prediction and what the
submission did stand in one file, one after the other.
"""

import json
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.chunk_map.chunk_map import KernelRow
from phosd.engine.system.native import hook_library
from tests.support.harness import PATIENCE, PROGRAMS, environment

ROOT = Path(__file__).parents[3]
Ranges = list[tuple[int, int]]


@dataclass
class Submission:
    """One prediction with what was written, the hook's device memory only."""

    step: str
    predicted: Ranges
    everything: bool
    blocks: Ranges
    traced: int = 0
    kernels: list[str] = field(default_factory=list)
    missed: Ranges = field(default_factory=list)
    written: int = 0


def merged(ranges: Ranges) -> Ranges:
    result: Ranges = []
    for begin, end in sorted(ranges):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def common(one: tuple[int, int], ranges: Ranges) -> Ranges:
    """The parts of ``one`` that lie in ``ranges``, which are in order and do not overlap."""
    first = max(0, bisect_right(ranges, (one[0], 1 << 64)) - 1)
    parts = []
    for begin, end in ranges[first:]:
        if begin >= one[1]:
            break
        if end > one[0]:
            parts.append((max(begin, one[0]), min(end, one[1])))
    return parts


def size(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def pairs(ranges: list[list[int]]) -> Ranges:
    return [(begin, end) for begin, end in ranges]


def submissions(path: Path) -> Iterator[Submission]:
    """The predictions of a file, each with what the operations after it wrote."""
    step, current = "", None
    for line in path.read_text().splitlines():
        entry: dict[str, Any] = json.loads(line)
        if "step" in entry:
            step = entry["step"]
        elif "predicted" in entry:
            if current:
                yield current
            current = Submission(
                step, pairs(entry["predicted"]), entry["everything"], sorted(pairs(entry["blocks"]))
            )
        elif "written" in entry and current:
            predicted = merged(current.predicted)
            current.traced += 1
            if entry["kind"] == "kernel":
                current.kernels.append(entry["kernel"])
            for one in pairs(entry["written"]):
                for part in common(one, current.blocks):
                    inside = current.blocks if current.everything else predicted
                    current.written += part[1] - part[0]
                    if size(common(part, inside)) < part[1] - part[0]:
                        current.missed.append(part)
    if current:
        yield current


def record(
    command: list[str], folder: Path, trace: bool = True, extra: dict[str, str] | None = None
) -> tuple[str, list[Submission], Path]:
    """What the program printed, and its submissions."""
    log = folder / "submissions.jsonl"
    env = environment(hooked=True, runtime=folder, extra=extra)
    env["LD_PRELOAD"] = str(hook_library().parent / "tests/libphos_hook_recorder.so")
    env["PHOS_TEST_PREDICTIONS"] = str(log)
    if trace:
        env["PHOS_SOFTGPU_TRACE"] = str(log)
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, list(submissions(log)), log


BOTH = ["A", "B"]
EXPECTED: dict[str, list[str] | None] = {
    # A letter is the whole block; None is everything; what is absent was not submitted.
    "parameters": BOTH,
    "parameters_ptsz": BOTH,
    "cooperative": BOTH,
    "cooperative_ptsz": BOTH,
    "extra": BOTH,
    "configured": BOTH,
    "no parameters": [],
    "no addresses": [],
    "struct by value": ["A", "B", "C"],
    "struct at an odd offset": ["B", "C"],
    "tensor map": BOTH,
    "tensor map elsewhere": ["B", "C"],
    "known to write through its second": ["B"],
    "beyond what is known of it": ["B"],
    "suspect": None,
    "freed": ["A"],
    "kernel of a library": BOTH,
    "function of a library": BOTH,
    "loaded": BOTH,
    "loaded another": ["C"],
    "copy": ["A+5:10"],
    "copy_ptds": ["A+5:10"],
    "fill": ["B+8:40"],
    "fill_ptds": ["B+8:40"],
    "value": ["C+64:4"],
    "read": ["host"],
    "captured graph": BOTH,
    "updated graph": ["C"],
    "built graph": ["A", "B+10:5", "C+20:6"],
    "another kernel": ["B", "B+10:5", "C", "C+20:6"],
    "another fill and copy": ["A", "B+0:1", "C+0:2"],
    "child graph": ["A", "B+10:5", "C+20:6"],
    "graph with a suspect": None,
    "graph known to write through one": ["B"],
}


def test_each_call_is_taken_to_write_what_it_may(tmp_path: Path) -> None:
    known = (
        KernelRow("only_second", written=0b10),
        KernelRow("only_none", written=0),
        KernelRow("suspect", suspect=True),
    )
    rows = tmp_path / "kernels"
    rows.write_bytes(b"".join(row.packed for row in known))
    program = str(Path(__file__).parent / "programs/predictions.py")
    _, found, log = record([program], tmp_path, trace=False, extra={"PHOS_TEST_KERNELS": str(rows)})
    memory = next(m["memory"] for m in map(json.loads, log.open()) if "memory" in m)

    def told(submission: Submission) -> list[str] | None:
        if submission.everything:
            return None
        names = []
        for begin, end in submission.predicted:
            name = next((n for n, a in memory.items() if a <= begin < a + (3 << 20)), "host")
            whole = (begin, end) in submission.blocks or name == "host"
            names.append(name if whole else f"{name}+{begin - memory[name]}:{end - begin}")
        return sorted(names)

    steps: dict[str, list[list[str] | None]] = {}
    for submission in found:
        if submission.step not in ("", "preparations"):
            steps.setdefault(submission.step, []).append(told(submission))
    within = steps.pop("child graph changed within", [None])
    assert within == [None]
    assert {name: calls[0] for name, calls in steps.items()} == EXPECTED
    assert {name: len(calls) for name, calls in steps.items() if len(calls) != 1} == {
        "loaded": 20,
        "loaded another": 20,
    }
    assert all(calls.count(calls[0]) == len(calls) for calls in steps.values())


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("single", {}),
        ("features", {}),
        ("churn", {}),
        ("two_devices", {"PHOS_SOFTGPU_DEVICES": "2"}),
    ],
)
def test_what_programs_write_was_predicted(
    tmp_path: Path, program: str, extra: dict[str, str]
) -> None:
    """Every byte of every submission is: these programs keep no addresses in memory."""
    _, found, _ = record(
        [str(PROGRAMS / f"{program}.py"), "6"], tmp_path, extra={"PHOS_TEST_PACE": "0", **extra}
    )
    check(found, kernels=10)


def test_what_graphs_write_was_predicted(tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs/graph_writes.py"
    _, found, _ = record([str(program), "6"], tmp_path, extra={"PHOS_TEST_PACE": "0"})
    check(found, kernels=12)
    assert [s for s in found if len(s.kernels) >= 3], "no graph was launched as a whole"


def test_what_the_corpus_writes_was_predicted(tmp_path: Path) -> None:
    """Kernels of every kind."""
    output, found, _ = record(
        [str(ROOT / "tests/native/corpus/run.py"), "--record", str(tmp_path / "out.npz")], tmp_path
    )
    assert "0 failures" in output
    check(found, kernels=60)


def check(found: list[Submission], kernels: int) -> None:
    missed = [(s.kernels, s.missed[:3]) for s in found if s.missed]
    assert not missed
    writers = [s for s in found if s.kernels and s.written]
    assert len(writers) >= kernels
    assert not [s for s in found if s.everything]
    assert all(s.traced for s in writers)
