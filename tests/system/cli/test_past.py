"""``phos history``, ``phos events`` and ``phos recover`` as others than root."""

import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click
import pytest

from phosd.cli.commands.events import events
from phosd.client.times import instant, moment
from phosd.engine.system.procfs import process_id
from phosd.units import duration
from tests.support.fake_engine import manifest, this_process
from tests.support.service import Service
from tests.system.cli.test_client import AS_NOBODY, PHOS, lines, phos

ME = str(os.getpid())
NOBODY = pwd.getpwnam("nobody").pw_uid


def at(text: str) -> float:
    """The seconds since the epoch that a time on the command line stands for."""
    found = moment(click.Context(events), events.params[0], text)
    assert found is not None
    return found / 1e6


@pytest.fixture
def two_hours_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time is two hours ahead of UTC; here, and in what is started."""
    monkeypatch.setenv("TZ", "EAST-2")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_days_have_names(two_hours_east: None) -> None:
    now = datetime(2026, 11, 21, 23, 30, tzinfo=UTC).timestamp()  # the 22nd, two hours east
    assert instant("today", now) / 1e6 == datetime(2026, 11, 21, 22, tzinfo=UTC).timestamp()
    assert instant("yesterday", now) / 1e6 == datetime(2026, 11, 20, 22, tzinfo=UTC).timestamp()


def test_people_read_local_time_and_programs_utc(service: Service, two_hours_east: None) -> None:
    service.engine.stored["i"] = manifest("i")
    assert "2026-01-02 05:04 " in phos(service, "images").stdout
    assert "created       2026-01-02 05:04:05\n" in phos(service, "images", "i").stdout
    (row,) = lines(phos(service, "images", "--json").stdout)
    assert row["created"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("2026-11-21", datetime(2026, 11, 20, 22, tzinfo=UTC)),
        ("2026-11-21T15:30", datetime(2026, 11, 21, 13, 30, tzinfo=UTC)),
        ("2026-11-21T15:30:07Z", datetime(2026, 11, 21, 15, 30, 7, tzinfo=UTC)),
        ("2026-11-21T15:30+02:00", datetime(2026, 11, 21, 13, 30, tzinfo=UTC)),
        ("1960-01-01", datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_dates(text: str, when: datetime, two_hours_east: None) -> None:
    """Without a zone they are local."""
    assert at(text) == when.timestamp()


@pytest.mark.parametrize(
    ("text", "ago"), [("90s", 90), ("1.5h", 5400), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_how_long_ago(text: str, ago: float) -> None:
    before = time.time()
    assert before - ago - 1 < at(text) <= time.time() - ago + 1
    assert duration(text) == ago


@pytest.mark.parametrize("text", ["", "2", "soon", "-2h", "2026-13-01", "٢h", "9" * 400 + "d"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write for example 30m"):
        at(text)


def test_the_history_of_a_process_with_its_timeline(service: Service) -> None:
    service.engine.go.set()
    service.engine.stored["i"] = manifest("i")
    phos(service, "checkpoint", ME)
    phos(service, "verify", "i")

    def found(*words: str) -> list[dict[str, Any]]:
        return lines(phos(service, "history", "--json", *words).stdout)

    assert [row["operation"] for row in found()] == ["verify", "checkpoint"]
    (row,) = found("--pid", ME, "--since", "1h", "--state", "done")
    first = row["phases"][0]
    assert (first["name"], first["stopped"], first["bytes"]) == ("prepare", False, 0)
    assert abs(first["begin"] / 1e6 - row["started"]) < 1e-4
    assert found("--operation", "verify")[0]["target"] == "i"
    assert found("--until", "1h") == []
    assert found("--limit", "1")[0]["operation"] == "verify"
    past = [
        {"id": number, "operation": "delete", "target": "x", "owner": 0, "state": "done"}
        | {"started": 1.0}
        for number in range(1_000, 1_600)
    ]
    service.history._database.record(lambda tables: tables["jobs"].insert_all(past))
    numbers = [row["id"] for row in found("--limit", "555", "--operation", "delete")]
    assert numbers == [*range(1_599, 1_044, -1)]
    assert "image-0" in phos(service, "history", "--pid", ME).stdout
    refused = phos(service, "history", "--since", "then")
    assert refused.returncode == 2
    assert "'then' is no time" in refused.stderr


def test_why_a_mode_was_used_is_told_where_it_is_news(service: Service) -> None:
    service.engine.go.set()
    for mode, why in (("concurrent", "the usual"), ("driver", "it has no hook")):
        service.engine.why, service.engine.mode = why, mode
        phos(service, "checkpoint", ME)
    table = phos(service, "history").stdout
    assert "(it has no hook)" in table and "the usual" not in table
    rows = lines(phos(service, "history", "--json").stdout)
    assert [row["why"] for row in rows] == ["it has no hook", "the usual"]


def test_the_result_of_a_move_names_the_gpu(service: Service) -> None:
    service.engine.running = [this_process(start_time=process_id(os.getpid()).start_time)]  # type: ignore[union-attr]
    service.engine.go.set()
    phos(service, "migrate", ME, "--to", "0:0")
    for words in (["history"], ["jobs"], ["jobs", "1"]):
        assert "GPU 0\n" in phos(service, *words).stdout.replace(" \n", "\n"), words


def test_events_are_listed(service: Service) -> None:
    service.engine.go.set()
    phos(service, "checkpoint", ME)
    (end, begin) = lines(phos(service, "events", "--json").stdout)
    assert (end["kind"], end["severity"], end["subject"]) == ("job", "info", "job 1")
    assert begin["text"].startswith("phosd ")  # type: ignore[attr-defined]
    table = phos(service, "events", "--since", "1h").stdout
    assert table.split()[:3] == ["TIME", "SEVERITY", "KIND"]
    assert f"checkpoint of {ME}: done: image-0" in table
    assert phos(service, "events", "--severity", "warning").stdout == ""


def test_who_is_not_root_has_the_daemon_recover_what_is_theirs(service: Service) -> None:
    def recover(pid: str, bus: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*AS_NOBODY, *PHOS, "recover", pid, *more],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PHOS_BUS": bus},
        )

    with subprocess.Popen(["sleep", "1000"], user=NOBODY, group=NOBODY, extra_groups=[]) as theirs:
        try:
            done = recover(str(theirs.pid), service.address)
            assert (done.returncode, service.engine.recovered) == (0, [theirs.pid]), done.stderr
            assert "was given back its parked memory" in done.stdout
            refused = recover(ME, service.address)
            assert (refused.returncode, len(service.engine.recovered)) == (3, 1)
            assert f"process {ME} belongs to uid 0" in refused.stderr
            some = recover(ME, service.address, str(theirs.pid))
            assert (some.returncode, len(service.engine.recovered)) == (3, 2)
            assert "was given back its parked memory" in some.stdout
            assert some.stderr.endswith(f"phos: 1 of 2 failed: {ME}\n")
            alone = recover(str(theirs.pid), "unix:path=/nowhere")
            assert alone.returncode == 3
            assert "only root may bring processes back" in alone.stderr
        finally:
            theirs.kill()
