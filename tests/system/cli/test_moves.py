"""``phos migrate``, ``suspend``, ``resume``, ``swap`` and ``evacuate``."""

import dataclasses
import os
import pty
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.bus import path_of
from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.program.away import Away
from phosd.errors import OutOfMemory, Unsupported
from phosd.service.jobs.options import MigrateRequest, ResumeRequest, SuspendRequest
from tests.support.fake_engine import GPU, this_process
from tests.support.harness import running, wait_until
from tests.support.service import Service
from tests.system.cli.test_client import AS_NOBODY, NOBODY, PHOS, lines, phos
from tests.system.service.test_moves import seen

ME = os.getpid()
PID = str(ME)
GIB = 1 << 30


@pytest.fixture
def other() -> Iterator[int]:
    """Another process."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def at_once(service: Service) -> Service:
    """A service whose engine does everything at once, to this process on GPU 0 of two."""
    service.engine.devices = [GPU, GpuInfo(1, "GPU-5678-cd", GPU.name, 1 << 34, 0)]
    service.engine.running = [seen(ME, device_bytes=GIB)]
    service.engine.go.set()
    wait_until(lambda: '"GPU-5678-cd"' in service.call("ListGPUs"), "the second GPU")
    service.call("ListProcesses")
    return service


def test_migrate(at_once: Service) -> None:
    words = ("migrate", PID, "--to", "0:1", "--deadline", "3", "--mode", "driver", "--queue")
    done = phos(at_once, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"process {PID} is on GPU 1 now, after ")
    assert "the program stood still for" in done.stdout
    request = MigrateRequest(deadline=3, mode="driver", queue=True)
    assert at_once.engine.moves == [("migrate", ME, "0:1", request, 0)]
    rows = lines(phos(at_once, "migrate", PID, "--to", "1", "--json").stdout)
    assert (rows[-1]["state"], rows[-1]["result"], rows[-1]["destination"]) == ("done", "0:1", "1")
    told = phos(at_once, "jobs", "1").stdout
    assert "destination   0:1" in told
    (row, _) = lines(phos(at_once, "history", "--operation", "migrate", "--json").stdout)
    assert row["destination"] == "1"


def test_suspend_and_resume(at_once: Service) -> None:
    done = phos(at_once, "suspend", PID, "--where", "disk")
    assert done.returncode == 0, done.stderr
    assert "its device memory is on disk; `phos resume" in done.stdout
    wait_until(
        lambda: (
            [row["state"] for row in lines(phos(at_once, "ps", "--json").stdout)] == ["suspended"]
        ),
        "its state",
    )
    done = phos(at_once, "resume", PID, "--gpu", "1")
    assert done.stdout.startswith(f"process {PID} runs on GPU 1 again, after ")
    assert at_once.engine.moves == [
        ("suspend", ME, SuspendRequest(where="disk"), 0),
        ("resume", ME, ResumeRequest(gpu="1"), 0),
    ]
    assert "in host memory" in phos(at_once, "suspend", PID).stdout
    hollow = phos(at_once, "suspend", PID, "--hollow")
    assert "in host memory, and its contexts stay on its GPUs; `phos resume" in hollow.stdout
    assert at_once.engine.moves[-1] == ("suspend", ME, SuspendRequest(hollow=True), 0)


def test_swap(at_once: Service, other: int) -> None:
    done = phos(at_once, "swap", PID, str(other), "--where", "memory")
    assert done.stdout.startswith(f"process {PID} is suspended and process {other} runs, after ")
    assert at_once.engine.moves == [("swap", ME, other, SuspendRequest(where="memory"), 0)]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["migrate", NOBODY, "--to", "1"], 4, "there is no process"),
        (["migrate", PID], 2, "Missing option '--to'"),
        (["migrate", PID, "--to", ""], 2, "name a GPU"),
        (["migrate", PID, "--to", "1", "--mode", "stop"], 2, "Invalid value"),
        (["suspend", PID, "--where", "tape"], 2, "Invalid value"),
        (["suspend", PID, "--deadline", "0"], 2, "Invalid value"),
        (["resume", NOBODY], 4, "there is no process"),
        (["swap", PID, PID], 2, "cannot take its own place"),
        (["swap", PID], 2, "Missing argument 'IN'"),
        (["evacuate", "7"], 2, "'7' names no GPU of this node"),
        (["evacuate"], 2, "Missing argument 'GPU'"),
    ],
)
def test_exit_codes(service: Service, words: list[str], status: int, text: str) -> None:
    done = phos(service, *words)
    assert (done.returncode, text in done.stderr) == (status, True), done.stderr
    assert service.engine.moves == []


@pytest.mark.parametrize(
    "words", [["migrate", PID, "--to", "1"], ["suspend", PID], ["resume", PID], ["swap", PID, "1"]]
)
def test_others_processes_are_not_authorized(service: Service, words: list[str]) -> None:
    done = subprocess.run(
        [*AS_NOBODY, *PHOS, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PHOS_BUS": service.address},
    )
    assert (done.returncode, "belongs to uid 0" in done.stderr) == (3, True), done.stderr


def test_an_error_of_the_engine_is_told(at_once: Service) -> None:
    at_once.engine.trouble = OutOfMemory("GPU 1 has 1 GiB free", hint="choose another")
    done = phos(at_once, "migrate", PID, "--to", "1")
    assert (done.returncode, done.stderr) == (5, "phos: GPU 1 has 1 GiB free; choose another\n")


# Evacuation


def three(service: Service) -> None:
    """What is on GPU 0: one to move, one too large, one without a hook, one that will fail."""
    service.engine.running = [
        seen(ME, device_bytes=GIB),
        this_process(pid=2, device_bytes=20 * GIB, command=("huge",)),
        this_process(pid=3, hook_state="driver", reason="no [hook]", device_bytes=0),
    ]


def test_an_evacuation_takes_contexts_of_hollow_programs_off(at_once: Service) -> None:
    away = Away("i", "memory", 1 << 20, 0.0, hollow=True)
    at_once.engine.running = [seen(ME, state="suspended", gpus=(0,), device_bytes=0, away=away)]
    at_once.call("ListProcesses")
    (step,) = lines(phos(at_once, "evacuate", "0", "--dry-run", "--json").stdout)
    assert (step["pid"], step["action"]) == (ME, "suspend") and "it is hollow" in str(step)
    assert "nothing" in phos(at_once, "evacuate", "1", "--dry-run").stdout


def test_a_dry_run_shows_the_plan_and_does_nothing(at_once: Service) -> None:
    three(at_once)
    done = phos(at_once, "evacuate", "0", "--dry-run")
    assert done.returncode == 0, done.stderr
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["PID", "MEMORY", "PLAN", "WHY", "COMMAND"]
    assert [row.split()[0] for row in rows] == ["2", PID, "3"]
    assert "suspend" in rows[0] and rows[0].split()[-1] == "huge"
    assert "to GPU 1" in rows[1]
    assert "stays" in rows[2] and "no [hook]" in rows[2]
    plan = lines(phos(at_once, "evacuate", "GPU-12", "--dry-run", "--json").stdout)
    assert [(row["pid"], row["action"], row["destination"]) for row in plan] == [
        (2, "suspend", ""),
        (ME, "migrate", "0:1"),
        (3, "stay", ""),
    ]
    assert at_once.engine.moves == []


def test_nothing_is_done_unasked(at_once: Service) -> None:
    done = phos(at_once, "evacuate", "0")
    assert (done.returncode, "command with --yes" in done.stderr) == (2, True)
    assert "to GPU 1" in done.stdout
    (_, error) = lines(phos(at_once, "evacuate", "0", "--json").stdout)
    assert error["error"] == "InvalidOption"
    assert at_once.engine.moves == []


def test_a_gpu_is_cleared(at_once: Service, other: int) -> None:
    at_once.engine.running.append(seen(other, device_bytes=15 * GIB + 1))
    done = phos(at_once, "evacuate", "0", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"process {other} moved to GPU 1, in " in done.stdout
    assert f"process {PID} is suspended; `phos resume {PID}`" in done.stdout
    assert done.stdout.endswith("GPU 0 is clear\n")
    assert [move[:2] for move in at_once.engine.moves] == [("migrate", other), ("suspend", ME)]
    done = phos(at_once, "evacuate", "0", "--yes")
    assert done.stdout == "nothing that you may move is on GPU 0\n"


def test_one_that_fails_does_not_keep_the_others(at_once: Service, other: int) -> None:
    at_once.engine.running += [
        seen(other, device_bytes=2 * GIB),
        this_process(pid=3, hook_state="driver", reason="no hook", device_bytes=0),
    ]

    def fail(progress: Progress) -> None:
        if at_once.engine.moves[-1][1] == other:
            raise OutOfMemory("it grew", hint="try again")

    at_once.engine.act = fail
    done = phos(at_once, "evacuate", "0", "--yes")
    assert done.returncode == 1
    assert f"process {other} is where it was: it grew; try again" in done.stderr
    assert f"GPU 0 is not clear: processes 3, {other} are still there" in done.stderr
    assert f"process {PID} moved to GPU 1" in done.stdout
    rows = lines(phos(at_once, "evacuate", "0", "--yes", "--json").stdout)
    assert {
        "pid": other,
        "error": "OutOfMemory",
        "reason": None,
        "message": "it grew; try again",
    } in rows
    assert rows[-1] == {"gpu": "0", "left": [3, other], "others": []}


def test_what_came_meanwhile_is_left(at_once: Service) -> None:
    def come(progress: Progress) -> None:
        at_once.engine.running.append(this_process(pid=3, hook_state="driver", device_bytes=0))

    at_once.engine.act = come
    done = phos(at_once, "evacuate", "0", "--yes")
    assert done.returncode == 1, done.stdout
    assert "GPU 0 is not clear: process 3 is still there" in done.stderr


def test_who_does_not_see_all_is_told_of_others(at_once: Service) -> None:
    def seen_there(*pids: int) -> None:
        at_once.engine.devices[0] = dataclasses.replace(GPU, pids=pids)
        text = " ".join(map(str, (len(pids), *pids)))
        path = path_of("gpu", GPU.uuid)
        wait_until(lambda: at_once.get(path, "Gpu1", "Processes") == text, "the GPU to tell")

    seen_there(1, ME)
    sleep = [*AS_NOBODY[:3], "sleep", "1000"]

    def evacuate(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*AS_NOBODY, *PHOS, "evacuate", "0", "--yes", *words],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PHOS_BUS": at_once.address},
        )

    with subprocess.Popen(sleep) as mine:
        try:
            wait_until(lambda: Path(f"/proc/{mine.pid}").stat().st_uid != 0, "its user")
            at_once.engine.running.append(seen(mine.pid))
            done = evacuate()
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == (
                f"nothing of yours is left on GPU 0; processes 1, {ME} are there, of others"
            )
            at_once.engine._becomes(mine.pid, gpus=(0,))
            assert lines(evacuate("--json").stdout)[-1] == {
                "gpu": "0",
                "left": [],
                "others": [1, ME],
            }
            at_once.engine._becomes(mine.pid, gpus=(0,))
            seen_there()
            assert evacuate().stdout.endswith("nothing of yours is left on GPU 0\n")
        finally:
            mine.kill()


def test_what_moved_with_another_is_not_moved_again(at_once: Service, other: int) -> None:
    """Processes that share device memory move together."""
    at_once.engine.running.append(seen(other, device_bytes=2 * GIB))

    def both(progress: Progress) -> None:
        at_once.engine._becomes(ME, gpus=(1,))

    at_once.engine.act = both
    done = phos(at_once, "evacuate", "0", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"process {PID} has left GPU 0 already" in done.stdout
    assert [move[1] for move in at_once.engine.moves] == [other]


def test_what_moved_with_a_later_one_is_not_left(at_once: Service, other: int) -> None:
    """One that shares device memory with a process above it cannot be moved by itself."""
    at_once.engine.running.append(seen(other, device_bytes=2 * GIB))

    def fail_or_take_along(progress: Progress) -> None:
        if at_once.engine.moves[-1][1] == other:
            raise Unsupported("it is below another", hint="move that one")
        at_once.engine._becomes(other, gpus=(1,))

    at_once.engine.act = fail_or_take_along
    done = phos(at_once, "evacuate", "0", "--yes")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "GPU 0 is clear")
    assert f"process {other} is where it was: it is below another" in done.stderr


@pytest.mark.parametrize(("answer", "moved"), [(b"y\n", 1), (b"n\n", 0)])
def test_who_sits_there_is_asked(at_once: Service, answer: bytes, moved: int) -> None:
    controller, terminal = pty.openpty()
    with running(
        [*PHOS, "evacuate", "0"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=os.environ | {"PHOS_BUS": at_once.address, "TERM": "dumb"},
    ) as process:
        os.close(terminal)
        shown = b""
        while b"evacuate GPU 0 as planned?" not in shown:
            assert select.select([controller], [], [], 60)[0], shown
            shown += os.read(controller, 4096)
        os.write(controller, answer)
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(controller)
    assert process.returncode == (0 if moved else 1)
    assert ("GPU 0 is clear" in out) is bool(moved)
    assert len(at_once.engine.moves) == moved


def test_who_cancels_one_means_all(at_once: Service, other: int) -> None:
    at_once.engine.running.append(seen(other, device_bytes=2 * GIB))
    at_once.engine.go.clear()
    with running(
        [*PHOS, "evacuate", "0", "--yes"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PHOS_BUS": at_once.address},
    ) as process:
        wait_until(lambda: at_once.engine.moves, "the first step")
        phos(at_once, "jobs", "--cancel", "1")
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 1
    first, second = sorted((ME, other))
    assert f"GPU 0 is not clear: processes {first}, {second} are still there" in errors
    assert len(at_once.engine.moves) == 1
