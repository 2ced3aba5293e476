"""The matrix of programs: what a machine lacks is told, and what grows is no success."""

import dataclasses

import pytest

from bench.compatibility import page
from bench.entries import ENTRIES
from bench.matrix import NotHere, check_needs, verdict
from bench.use import Use


def test_what_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.matrix._gpus", lambda: 1)
    needs_more = dataclasses.replace(ENTRIES["fsdp-4"], packages=("torch", "timm"))
    with pytest.raises(NotHere, match=r"needs timm, 4 GPUs \(1 here\)"):
        check_needs(needs_more, {"torch": "2.11.0"})


def test_nothing_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.matrix._gpus", lambda: 4)
    check_needs(ENTRIES["fsdp-4"], {"torch": "2.11.0"})


def test_more_by_less_than_one_a_job_is_no_growth() -> None:
    before = Use(anonymous_kib=100_000, descriptors=40, mappings=300)
    assert not Use(160_000, 48, 364).grown(before)
    assert Use(100_000, 130, 390).grown(before) == {"descriptors": 90, "mappings": 90}


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        ({"compared": 3, "apart": 0.0}, "restored"),
        ({"compared": 3, "apart": 0.1}, "differs"),
        ({"compared": 3, "apart": 0.1, "undisturbed_apart": 0.1}, "restored"),
        ({"compared": 0, "apart": 0.0}, "failed"),
        ({"compared": 3, "apart": 0.0, "grown": {"program": {}, "phosd": {}}}, "restored"),
        ({"compared": 3, "apart": 0.0, "grown": {"phosd": {"descriptors": 90}}}, "grown"),
        ({"refused": "no"}, "refused"),
        ({"ended": "no"}, "ended"),
    ],
)
def test_a_verdict(result: dict[str, object], wanted: str) -> None:
    assert verdict(result) == wanted


def test_the_page_has_each_entry_once() -> None:
    titles = [line.split(" | ")[0] for line in page().splitlines() if line.startswith("| ")]
    assert len(titles) - len(set(titles)) == titles.count("| name") - 1 + titles.count("| ---") - 1
