"""``phos checkpoint``, and what lists tell of it: schedules, queues, modes, guesses."""

import os
import pty
import re
import select
import signal
import subprocess
from pathlib import Path

import click
import pytest

from phosd.cli.commands.checkpoint import interval
from phosd.cli.main import named
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.engine.job.checks import Finding
from phosd.engine.job.figures import Figures
from phosd.engine.job.progress import Progress
from phosd.errors import Busy, Unsupported
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.process_identity import identify
from tests.support.fake_engine import block, manifest, this_process
from tests.support.harness import running, wait_until
from tests.support.service import Service
from tests.system.cli.test_client import PHOS, lines, phos
from tests.system.cli.test_json import check

ME = str(os.getpid())


def test_all_options_are_passed_on(service: Service) -> None:
    service.engine.go.set()
    service.engine.stored["old"] = manifest("old")
    words = ["--mode=concurrent", "--fallback=none", "--parent=old", "--deadline=3", "--queue"]
    words += ["--release-cached"]
    assert phos(service, "checkpoint", ME, *words).stdout == "image-0\n"
    assert service.engine.requests == [
        CheckpointRequest(
            mode="concurrent",
            fallback="none",
            parent="old",
            deadline=3.0,
            queue=True,
            release_cached=True,
        )
    ]


def test_a_program_ends_when_it_is_saved(service: Service) -> None:
    service.engine.go.set()
    done = phos(service, "checkpoint", ME, "--end", "--in-memory")
    assert done.stdout == "image-0\n"
    assert f"process {ME} has ended; `phos restore image-0` continues it" in done.stderr
    assert service.engine.requests == [CheckpointRequest(then="end", in_memory=True)]


def test_a_program_is_held_until_it_is_to_continue(service: Service) -> None:
    service.engine.go.set()
    words = [*PHOS, "--bus", service.address, "checkpoint", ME, "--hold"]

    def told_to_continue() -> subprocess.CompletedProcess[str] | None:
        done = phos(service, "continue", ME)
        return done if done.returncode == 0 else None

    with running(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as held:
        told = wait_until(told_to_continue, "it to be held")
        assert told.stdout == f"process {ME} goes on\n"
        assert held.communicate()[0] == "image-0\n"
    refused = phos(service, "continue", ME)
    assert refused.returncode == 4 and f"process {ME} is not held" in refused.stderr


def test_a_dry_run_tells_what_stands_in_the_way(service: Service) -> None:
    service.engine.stored["old"] = manifest("old")
    service.engine.found = [Finding("processes", found="2 in all; with GPU: 7")]
    done = phos(service, "checkpoint", ME, "--dry-run", "--mode=stop")
    assert done.returncode == 0 and re.search("processes +✓ +2 in all; with GPU: 7", done.stdout)
    assert service.engine.requests == [CheckpointRequest(mode="stop")]
    trouble = Unsupported("it uses io_uring", hint="avoid it", reason="process-state")
    service.engine.found += [Finding("files", trouble), Finding("pids", Busy("7 is taken"))]
    for command in (("checkpoint", ME), ("restore", "old")):
        done = phos(service, *command, "--dry-run")
        assert done.returncode == 6
        assert re.search(r"files +✗ Unsupported +it uses io_uring; avoid it", done.stdout)
        assert "[" not in done.stdout, "a reason is for programs"
        told = lines(phos(service, *command, "--dry-run", "--json").stdout)
        assert [
            tuple(row[key] for key in ("check", "trouble", "reason", "text")) for row in told
        ] == [
            ("processes", None, None, "2 in all; with GPU: 7"),
            ("files", "Unsupported", "process-state", "it uses io_uring; avoid it"),
            ("pids", "Busy", None, "7 is taken"),
        ]
        check(told, "`--dry-run`")
    assert not service.engine.made and list(service.engine.stored) == ["old"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("60s", 60), ("90", 90), ("1.5m", 90), ("10min", 600), ("2h", 7200), ("1d", 86_400)),
        ("off", 0),
    ],
)
def test_intervals(text: str, seconds: float) -> None:
    assert interval(text) == seconds


@pytest.mark.parametrize(
    "text", ["often", "0", "0s", "60x", "60mi", "-5s", "", "nan", "1e3", "5 s"]
)
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write for example 60s"):
        interval(text)


def test_the_commands_of_the_example_for_services_are_understood() -> None:
    text = (Path(__file__).parents[3] / "examples/systemd/50-phos.conf").read_text()
    commands = [line.split() for line in re.findall(r"(?m)^#   phos (.*)$", text)]
    assert [words[0] for words in commands] == ["checkpoint", "restore"]
    for name, *words in (re.sub(r"\$\(.*\)", ME, " ".join(words)).split() for words in commands):
        context = named(name).make_context(name, words)
        assert context.params.get("every") in (None, 600.0)


def test_periodic_checkpoints(service: Service) -> None:
    service.engine.running = [this_process(start_time=identify(os.getpid()).start_time)]
    phos(service, "ps")
    service.engine.go.set()
    done = phos(service, "checkpoint", ME, "--every", "2m", "--keep", "3")
    assert (done.returncode, done.stdout) == (0, "image-0\n")
    assert done.stderr.splitlines()[-1] == (
        f"again every 2 min; `phos checkpoint {ME} --every off` ends that"
    )
    assert "2 min, last 3" in phos(service, "ps").stdout
    (row,) = lines(phos(service, "ps", "--json").stdout)
    assert (row["checkpoint_interval"], row["checkpoints_kept"]) == (120, 3)
    done = phos(service, "checkpoint", ME, "--every", "off")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no periodic checkpoints any more; its images stay" in done.stderr
    (row,) = lines(phos(service, "ps", "--json").stdout)
    assert (row["checkpoint_interval"], row["checkpoints_kept"]) == (None, None)
    (row,) = lines(phos(service, "checkpoint", ME, "--every", "off", "--json").stdout)
    assert row == {"pid": os.getpid(), "checkpoint_interval": None}


def test_a_first_checkpoint_that_fails_says_where_to_look(service: Service) -> None:
    def fail(progress: Progress) -> None:
        raise Unsupported("it uses managed memory", hint="avoid it")

    service.engine.act = fail
    done = phos(service, "checkpoint", ME, "--every", "5s")
    assert done.returncode == 6
    assert done.stderr.splitlines() == [
        "`phos ps` tells whether it is tried again every 5 s",
        "phos: it uses managed memory; avoid it",
    ]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_ctrl_c_ends_the_schedule_too(service: Service, form: list[str]) -> None:
    service.engine.running = [this_process(start_time=identify(os.getpid()).start_time)]
    with running(
        [*PHOS, "checkpoint", ME, "--every", "1h", *form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PHOS_BUS": service.address},
    ) as process:
        wait_until(lambda: service.engine.requests, "the job")
        process.send_signal(signal.SIGINT)
        out, told = process.communicate(timeout=60)
    assert process.returncode == 1
    if form:
        assert {"pid": os.getpid(), "checkpoint_interval": None} in lines(out)
        assert lines(out)[-1]["error"] == "Cancelled"
    else:
        assert f"process {ME} has no periodic checkpoints any more" in told
    (row,) = lines(phos(service, "ps", "--json").stdout)
    assert row["checkpoint_interval"] is None


def test_a_cancelled_checkpoint_of_others_leaves_the_schedule(service: Service) -> None:
    """So does the end of phosd, which cancels its jobs: a schedule outlives that."""
    service.engine.running = [this_process(start_time=identify(os.getpid()).start_time)]
    with running(
        [*PHOS, "checkpoint", ME, "--every", "1h"],
        stderr=subprocess.PIPE,
        env=os.environ | {"PHOS_BUS": service.address},
    ) as process:
        wait_until(lambda: service.engine.requests, "the job")
        phos(service, "jobs", "--cancel", "1")
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "`phos ps` tells whether it is tried again every 1 h" in told
    (row,) = lines(phos(service, "ps", "--json").stdout)
    assert row["checkpoint_interval"] == 3600


def test_a_queued_checkpoint_says_that_it_waits(service: Service) -> None:
    service.start("Checkpoint", "ua{sv}", ME, 0)
    with running(
        [*PHOS, "checkpoint", ME, "--queue", "--json"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PHOS_BUS": service.address},
    ) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "it says nothing while it waits"
        (first,) = lines(process.stdout.readline())
        assert first["state"] == "queued"
        service.engine.go.set()
        rows = lines(process.stdout.read())
    assert process.returncode == 0
    assert (rows[-1]["state"], rows[-1]["result"]) == ("done", "image-1")


def test_a_job_is_told_with_its_phases_and_guesses(service: Service) -> None:
    def act(progress: Progress) -> None:
        progress.phase("drain", bytes_total=3 << 20)
        progress.advance(3 << 20)
        progress.found_suspects([KernelMark("chase", 1)])
        progress.note("mode stop: there is room for shadows")
        progress.note("mode recopy: a guess was wrong")
        progress.figures = Figures(waited_seconds=0.25)

    service.engine.act = act
    service.engine.go.set()
    service.engine.why = "there is room for shadows"
    phos(service, "checkpoint", ME)
    text = phos(service, "jobs", "1").stdout
    told = dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1)
    assert told["job"] == f"1: checkpoint {ME}"
    assert told["mode"] == "stop: there is room for shadows"
    assert told["suspects"] == "chase"
    assert told["drained"].startswith("3.0 MiB at ")
    assert told["wrong"] == "guesses 1"
    assert told["figure"] == "waited seconds 0.25 s"
    assert told["note"] == "mode recopy: a guess was wrong"
    assert text.count("there is room for shadows") == 1
    assert told["quiesce"].split()[-1] == "stopped"
    assert "stopped" not in told["prepare"]
    (row,) = lines(phos(service, "jobs", "1", "--json").stdout)
    assert (row["wrong_guesses"], row["suspects"]) == (1, ["chase"])
    assert (row["drained_bytes"], row["details"]) == (3 << 20, {"waited_seconds": 0.25})
    assert row["why"] == "there is room for shadows"
    (listed,) = lines(phos(service, "jobs", "--json").stdout)
    assert listed == row
    (past,) = lines(phos(service, "history", "--json").stdout)
    assert (past["wrong_guesses"], past["drained_bytes"]) == (1, 3 << 20)
    table = phos(service, "history").stdout
    assert "(there is room for shadows)" in table
    assert "iB/s" in table
    assert phos(service, "jobs", "9").returncode == 4


def test_images_tell_what_they_share(service: Service) -> None:
    service.engine.stored["i1"] = manifest("i1", blocks=(block(1),), why="it fits")
    service.engine.stored["i2"] = manifest("i2", blocks=(block(1, 2),))
    rows = lines(phos(service, "images", "--json").stdout)
    assert [(row["stored_bytes"], row["shared_bytes"]) for row in rows] == [
        (2 << 20, 0),
        (4 << 20, 2 << 20),
    ]
    assert rows[0]["why"] == "it fits"
    phos(service, "rm", "i1")
    (row,) = lines(phos(service, "images", "--json").stdout)
    assert row["shared_bytes"] == 0


def test_the_bar_tells_the_stop_from_the_drain(service: Service) -> None:
    def act(progress: Progress) -> None:
        progress.advance(500)
        wait_until(lambda: b"program stopped" in shown, "the stop on the terminal")
        progress.phase("drain", bytes_total=1000)
        progress.advance(250)

    service.engine.act = act
    controller, terminal = pty.openpty()
    shown = b""
    with running(
        [*PHOS, "checkpoint", ME],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=os.environ | {"PHOS_BUS": service.address, "TERM": "xterm", "COLUMNS": "120"},
    ):
        os.close(terminal)
        while b"250/1,000 bytes" not in shown and select.select([controller], [], [], 20)[0]:
            shown += os.read(controller, 4096)
        service.engine.go.set()
    os.close(controller)
    assert b"\x1b[1;33mquiesce    program stopped" in shown
    assert b"drain      program running" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--end", "--hold"), "cannot --hold, too"),
        (("--every", "60s", "--end"), "leave out --end, or --every"),
        (("--every", "0s"), "is no interval"),
    ],
)
def test_options_that_exclude_each_other(
    service: Service, words: tuple[str, ...], says: str
) -> None:
    done = phos(service, "checkpoint", "1", *words)
    assert done.returncode == 2 and says in done.stderr
    assert not service.engine.made
