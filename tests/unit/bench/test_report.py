"""Series of one program without and with analysis are told apart, and put beside each other. The
plots of the pages are those of the results beside them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import moved
from bench.report import beside, report, with_and_without
from tests.support.checkout import ROOT

_BENCHMARKS = ROOT / "docs/benchmarks"


def lines_of(results: str) -> list[Any]:
    return [json.loads(line) for line in (_BENCHMARKS / results).read_text().splitlines()]


def series(program: str, needless: int, looks: int, analysed: dict[str, int] | None) -> Any:
    times = {"median": 1e-6, "p99": 2e-6, "p999": 3e-6, "worst": 9e-6}
    done = {
        "stop_s": 0.5,
        "usual_iteration_s": 0.1,
        "iterations_around": 12,
        "drain": {"count": 10, "seconds": 1.7},
        "draining_s": 1.0,
        "whole_s": [0.12, 0.14],
        "wrong_guesses": 0,
        "details": {
            "drain_seconds": 1.0,
            "drain_bytes": 8 << 30,
            "shadowed_chunks": 100,
            "needless_shadows": needless,
            "submissions": looks,
            **{f"look_{which}_seconds": took for which, took in times.items()},
        },
    }
    return {
        "series": program,
        "mode": "concurrent",
        "incremental": False,
        "state": "/dev/shm",
        "analysed": analysed,
        "checkpoints": [done, done, {"error": "the program has ended"}],
    }


def test_without_and_with_analysis() -> None:
    known = {"kernels": 56, "unknown": 12}
    lines = [
        series("gpt2", 50, 700, None),
        series("gpt2", 5, 800, known),
        series("generate", 3, 900, known),  # there is none to compare it with
    ]
    pairs = with_and_without(lines)
    assert pairs == [(lines[0], lines[1])]
    row = beside(pairs).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "gpt2, concurrent",
        "56, 12",
        "2; 2",
        "50 of 100; 5 of 100",
        "20.0%; 20.0%",
        "4, 30.0%; 4, 30.0%",
        "1.00, 2.00, 3.00, 9.00; 1.00, 2.00, 3.00, 9.00",
        "1400; 1600",
        "0; 0",
    ]


@pytest.mark.parametrize(
    "plot, results, build",
    [
        ("stop", "h200", None),
        ("snapshot", "h200-snapshot", None),
        ("concurrent", "h200-concurrent", None),
        ("restore", "h100-restore", "stop and driver"),
    ],
)
def test_a_plot_shows_the_results(plot: str, results: str, build: str | None) -> None:
    lines = lines_of(f"{results}.jsonl")
    if build is not None:
        lines = [line for line in lines if line.get("build") == build]
    assert report(lines) == (_BENCHMARKS / f"{plot}.svg").read_text()


def test_the_plot_of_migrations_shows_the_results() -> None:
    rows = [row for row in lines_of("h200-moving.jsonl") if row["operation"] == "migrate"]
    assert moved.plot(rows) == (_BENCHMARKS / "moving.svg").read_text()
