"""The commands that talk to phosd: what they print, and how they exit."""

import json
import os
import pty
import pwd
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from phosd.cli.commands.doctor import Finding, _containers, _release
from phosd.cli.main import main
from phosd.engine.job.progress import Progress
from phosd.engine.node import gpus
from phosd.errors import OutOfSpace
from tests.support.authority import NO, authority
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import running, wait_until
from tests.support.service import Service

PHOS = [sys.executable, "-m", "phosd.cli.main"]
NOBODY = str(2**22)
"""No process has this pid."""
# Another user, who may yet read the code: the checkout can lie in a home that is closed to others.
AS_NOBODY = [
    *("setpriv", f"--reuid={pwd.getpwnam('nobody').pw_uid}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]


def phos(service: Service, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHOS, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PHOS_BUS": service.address} | environment,
    )


def at_a_terminal(service: Service, typed: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command whose standard input is a terminal at which a line is typed."""
    controller, terminal = pty.openpty()
    try:
        os.write(controller, f"{typed}\n".encode())
        return subprocess.run(
            [*PHOS, *words],
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PHOS_BUS": service.address},
        )
    finally:
        os.close(terminal)
        os.close(controller)


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_checkpoint_prints_the_image_and_only_that(service: Service) -> None:
    service.engine.go.set()
    service.engine.act = lambda progress: progress.note("mode stop: the hook is there")
    done = phos(service, "checkpoint", str(os.getpid()), "--mode", "stop")
    assert (done.returncode, done.stdout) == (0, "image-0\n")
    assert "mode stop: the hook is there" in done.stderr
    assert "the program stood still for" in done.stderr
    (request,) = service.engine.requests
    assert (request.mode, request.tcp) == ("stop", "refuse")  # type: ignore[attr-defined]


def test_json_is_one_object_a_line_to_the_end(service: Service) -> None:
    service.engine.go.set()
    done = phos(service, "--json", "checkpoint", str(os.getpid()))
    rows = lines(done.stdout)
    assert rows[-1]["state"] == "done"
    assert rows[-1]["result"] == "image-0"
    assert [p["name"] for p in rows[-1]["phases"]] == ["prepare", "quiesce", "publish"]  # type: ignore[attr-defined]
    assert done.stderr == ""


def test_a_failed_job_says_why(service: Service) -> None:
    def fail(progress: Progress) -> None:
        raise OutOfSpace("the disk is full", hint="delete an image")

    service.engine.act = fail
    done = phos(service, "checkpoint", str(os.getpid()))
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == "phos: the disk is full; delete an image\n"
    done = phos(service, "checkpoint", str(os.getpid()), "--json")
    assert done.returncode == 5
    assert lines(done.stdout)[-1] == {
        "error": "OutOfSpace",
        "reason": None,
        "message": "the disk is full; delete an image",
    }


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["checkpoint", NOBODY], 4, "there is no process"),
        (["checkpoint", "0"], 2, "is neither a process id, 1 to 4194304"),
        (["checkpoint", "5000000000"], 2, "is neither a process id, 1 to 4194304"),
        (["checkpoint", "1", "--in-memory"], 2, "give --end, too"),
        (["checkpoint", "1", "--keep", "3"], 2, "give --every, too"),
        (["ps", "5000000000"], 2, "is neither a process id, 1 to 4194304"),
        (["jobs", "5000000000"], 4, "phosd knows no job 5000000000; `phos jobs` lists"),
        (["checkpoint", "1", "--mode", "fast"], 2, "Invalid value"),
        (["restore", "nothing"], 4, "there is no image nothing"),
        (["verify", "nothing"], 4, "there is no image nothing"),
        (["rm", "nothing"], 4, "there is no image nothing"),
        (["rm"], 2, "Missing argument"),
        (["jobs", "--cancel", "99"], 4, "phosd knows no job 99; `phos jobs` lists"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_exit_codes(service: Service, words: list[str], status: int, text: str) -> None:
    done = phos(service, *words)
    assert (done.returncode, text in done.stderr) == (status, True), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("checkpoint",), "Missing argument 'PID'; `phos checkpoint --help` says what there is"),
        (("checkpoint", "1", "--durabel"), "No such option"),
        (("nonsense",), "No such command 'nonsense'; `phos --help`"),
        (("delete", "latest"), "No such command 'delete' (did you mean `phos rm`?); `phos"),
        (("restor", "latest"), "No such command 'restor' (did you mean `phos restore`?)"),
        (("ps", "1", "2"), "Got unexpected extra argument (2)"),
    ],
)
def test_wrong_usage_is_told_as_all_errors_are(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(main, words, prog_name="phos")
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"phos: {said}")
    for together in (("--json", *words), (*words, "--json")):
        done = CliRunner().invoke(main, together, prog_name="phos")
        (row,) = lines(done.stdout)
        assert (done.exit_code, row["error"], done.stderr) == (2, "Usage", "")
        assert str(row["message"]).startswith(said)


def test_no_words_get_the_help() -> None:
    done = CliRunner().invoke(main, (), prog_name="phos")
    assert done.exit_code == 2 and "A first try:" in done.output and "phos: " not in done.output


@pytest.mark.parametrize("verb", ["rm", "restore", "verify", "checkpoint"])
def test_others_things_are_not_authorized(service: Service, verb: str) -> None:
    service.engine.stored["i"] = manifest("i")
    target = str(os.getpid()) if verb == "checkpoint" else "i"
    done = subprocess.run(
        [*AS_NOBODY, *PHOS, verb, target],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PHOS_BUS": service.address},
    )
    assert (done.returncode, "belongs to uid 0" in done.stderr) == (3, True), done.stderr
    assert "i" in service.engine.stored


def test_restore_verify_and_rm(service: Service, tmp_path: object) -> None:
    service.engine.stored["i"] = manifest("i")
    done = phos(service, "restore", "i", "--files", "cut", "--output", "log.txt")
    assert (done.returncode, done.stdout) == (0, "4711\n")
    (request,) = service.engine.requests
    assert request.output == os.path.abspath("log.txt")  # type: ignore[attr-defined]  # noqa: PTH100
    assert phos(service, "verify", "i").stdout.startswith("i is whole (")
    assert phos(service, "rm", "i").stdout == "i is deleted\n"
    assert not service.engine.stored


def test_a_dry_run_of_several_clones_says_that_it_is_one(service: Service) -> None:
    service.engine.stored["i"] = manifest("i")
    told = "one clone is checked; 3 need 3 times its memory and GPU"
    assert told in phos(service, "restore", "i", "--clone", "3", "--dry-run").stderr
    assert "is checked" not in phos(service, "restore", "i", "--clone", "--dry-run").stderr


def test_lists(service: Service) -> None:
    assert phos(service, "images").stdout == ""
    service.engine.stored["i"] = manifest("i")
    service.engine.running = [this_process()]
    service.engine.go.set()
    phos(service, "checkpoint", str(os.getpid()))
    (process,) = lines(phos(service, "ps", "--json").stdout)
    assert process["pid"] == os.getpid()
    assert process["command"] == ["python", "train.py"]
    table = phos(service, "ps").stdout
    assert table.split()[0] == "PID"
    assert "python train.py" in table
    images = lines(phos(service, "images", "--json").stdout)
    assert [image["id"] for image in images] == ["i", "image-0"]
    assert images[0]["created"] == "2026-01-02T03:04:05Z"
    assert images[0]["verified"] is None
    (job,) = lines(phos(service, "jobs", "--json").stdout)
    assert (job["operation"], job["state"], job["result"]) == ("checkpoint", "done", "image-0")
    (past,) = lines(phos(service, "history", "--json").stdout)
    assert (past["operation"], past["state"], past["result"]) == ("checkpoint", "done", "image-0")
    for words in (["images"], ["jobs"], ["history"]):
        done = phos(service, *words)
        assert done.returncode == 0
        assert "image-0" in done.stdout


def test_ctrl_c_cancels_the_job_and_says_so(service: Service) -> None:
    process = subprocess.Popen(
        [*PHOS, "checkpoint", str(os.getpid())],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PHOS_BUS": service.address},
    )
    wait_until(
        lambda: (
            '"quiesce"' in service.get("/org/phos/job/_1", "Job1", "Phases")
            if service.engine.requests
            else False
        ),
        "the job",
    )
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert told.splitlines() == [
        "cancelling; once more to leave the job to itself",
        "phos: the job was cancelled; start it again when you are ready",
    ]
    assert service.get("/org/phos/job/_1", "Job1", "State") == '"cancelled"'


def test_jobs_cancel(service: Service) -> None:
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    assert phos(service, "jobs", "--cancel", "1").stdout == "job 1 is being cancelled\n"
    wait_until(
        lambda: service.get("/org/phos/job/_1", "Job1", "State") == '"cancelled"', "the end", 10
    )
    again = phos(service, "jobs", "--cancel", "1")
    assert (again.returncode, "has ended already" in again.stderr) == (6, True)


@pytest.mark.parametrize("at_a_terminal", [True, False])
def test_who_cancels_at_a_terminal_may_be_asked_for_a_password(
    service: Service, at_a_terminal: bool
) -> None:
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    controller, terminal = pty.openpty()
    with authority(service.address, NO) as polkit:
        done = subprocess.run(
            [*AS_NOBODY, *PHOS, "jobs", "--cancel", "1"],
            stdin=terminal if at_a_terminal else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PHOS_BUS": service.address},
        )
    for end in (controller, terminal):
        os.close(end)
    assert done.returncode == 3, done.stderr
    (question,) = polkit.questions
    assert (question.action, question.may_ask_user) == ("org.phos.cancel-others", at_a_terminal)


def test_without_a_daemon_the_mend_is_told(bus: str) -> None:
    done = subprocess.run([*PHOS, "ps", "--bus", bus], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        "phosd does not run on this bus; start it (`phosd --session 2>phosd.log &`" in done.stderr
    )
    done = subprocess.run(
        [*PHOS, "ps", "--bus", "unix:path=/none"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no D-Bus at unix:path=/none" in done.stderr
    done = subprocess.run(
        [*PHOS, "ps", "--bus", "nonsense"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "no D-Bus at nonsense" in done.stderr) == (1, True)


def test_a_daemon_that_dies_in_the_middle_is_told(service: Service) -> None:
    with running(
        [*PHOS, "checkpoint", str(os.getpid())],
        stderr=subprocess.PIPE,
        env=os.environ | {"PHOS_BUS": service.address},
    ) as process:
        assert process.stderr is not None
        wait_until(lambda: service.engine.requests, "the job")
        service.disconnect()
        assert "phosd ended while it worked on" in process.stderr.read()
    assert process.returncode == 1


@pytest.mark.parametrize(
    "name",
    [
        *("run", "ps", "checkpoint", "restore", "images", "verify", "rm", "jobs", "history"),
        *("events", "doctor"),
    ],
)
def test_help_teaches_by_example(name: str) -> None:
    done = subprocess.run(
        [*PHOS, name, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Example" in done.stdout
    assert f"phos {name}" in done.stdout


def test_doctor_works_without_a_daemon(bus: str) -> None:
    done = subprocess.run(
        [*PHOS, "doctor", "--json", "--bus", bus], capture_output=True, text=True, timeout=60
    )
    found = {row["subject"]: row for row in lines(done.stdout)}
    assert {"system", "hook", "digest", "gpu", "criu", "runtime", "space", "daemon"} <= set(found)
    assert found["daemon"]["level"] == "warning"
    for row in found.values():
        assert row["level"] == "ok" or row["mend"], row
    errors = [row for row in found.values() if row["level"] == "error"]
    assert done.returncode == (1 if errors else 0)


def test_doctor_asks_phosd_how_full_the_disk_of_its_images_is(
    service: Service, tmp_path: Path
) -> None:
    """It may keep them elsewhere than usual."""
    told = {row["subject"]: row["text"] for row in lines(phos(service, "doctor", "--json").stdout)}
    assert str(told["space"]).endswith(" free where phosd keeps images")
    named = phos(service, "doctor", "--json", f"--state-dir={tmp_path}").stdout
    assert any(str(row["text"]).endswith(f"for images in {tmp_path}") for row in lines(named))


def test_doctor_looks_for_what_criu_calls_in_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where containers are run, and wherever on the machine it is installed."""

    found: dict[str, str] = {}
    monkeypatch.setattr(shutil, "which", lambda name, path: found.get(name))
    assert _containers() == []
    found["runc"] = "/usr/sbin/runc"
    (missing,) = _containers()
    assert (missing.level, missing.mend) == ("warning", "apt-get install iptables")
    found["iptables-restore"] = "/usr/sbin/iptables-restore"
    (there,) = _containers()
    assert there.level == "ok"


def test_doctor_knows_drivers_that_end_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "driver_release", lambda: "580.159.03")
    assert _release("CUDA 13.0") == Finding("driver", "ok", "580.159.03, CUDA 13.0")
    monkeypatch.setattr(gpus, "driver_release", lambda: "610.57.04")
    found = _release("CUDA 13.3")
    assert found.level == "error" and "allow_unsafe_driver" in found.mend
    assert "610.57.04" in found.text and "NVIDIA/cuda-checkpoint/issues/58" in found.text


def test_doctor_finds_what_is_missing(bus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_CRIU", "/no/such/criu")
    done = subprocess.run(
        [*PHOS, "doctor", "--bus", bus, "--no-color"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "/no/such/criu" in done.stdout


def test_no_color(service: Service) -> None:
    """An error is red where nothing is against it."""
    words = ("rm", "nothing")
    assert "\x1b[1;31m" in phos(service, *words, FORCE_COLOR="1", NO_COLOR="").stderr
    assert "\x1b[1;31m" not in phos(service, *words, FORCE_COLOR="1", NO_COLOR="1").stderr
    done = phos(service, *words, "--no-color", FORCE_COLOR="1", NO_COLOR="")
    assert "\x1b[1;31m" not in done.stderr


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("variable", [None, "unix:path=/none"])
def test_the_bus_that_is_named_wins(service: Service, before: bool, variable: str | None) -> None:
    """Before the command or behind it, and whatever PHOS_BUS says."""
    named = ["--bus", service.address]
    done = subprocess.run(
        [*PHOS, *named, "ps"] if before else [*PHOS, "ps", *named],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | ({"PHOS_BUS": variable} if variable else {}),
    )
    assert done.returncode == 0, done.stderr


def test_all_that_can_be_deleted_is(service: Service) -> None:
    service.engine.stored |= {"a": manifest("a"), "b": manifest("b")}
    done = phos(service, "rm", "none", "a", "nothing")
    assert (done.returncode, done.stdout) == (4, "a is deleted\n")
    told = done.stderr.splitlines()
    assert [line.startswith("phos: there is no image") for line in told] == [True, True, False]
    assert told[-1] == "phos: 2 of 3 failed: none, nothing"
    done = phos(service, "rm", "none", "b", "--json")
    assert done.returncode == 4
    failed, deleted = lines(done.stdout)
    assert (failed["image"], failed["error"]) == ("none", "NoSuchImage")
    assert deleted == {"image": "b", "deleted": True}
    assert not service.engine.stored


def test_a_terminal_gets_a_progress_bar_with_the_phase(service: Service) -> None:
    service.engine.act = lambda progress: progress.advance(500)
    controller, terminal = pty.openpty()
    with running(
        [*PHOS, "checkpoint", str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=os.environ | {"PHOS_BUS": service.address, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(terminal)
        shown = b""
        while b"500/1,000 bytes" not in shown and select.select([controller], [], [], 20)[0]:
            shown += os.read(controller, 4096)
        service.engine.go.set()
        assert b"quiesce" in shown
        assert b"500/1,000 bytes" in shown
        assert process.stdout is not None
        assert process.stdout.read() == "image-0\n"
    os.close(controller)
    assert process.returncode == 0
