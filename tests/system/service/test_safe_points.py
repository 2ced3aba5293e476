"""Programs that ask for their own checkpoints, and that are stopped at their safe points only."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.bus import busctl
from tests.support.harness import (
    PROGRAMS,
    Target,
    alive,
    environment,
    parse,
    running,
    start,
    undisturbed,
    wait_until,
)
from tests.system.service.test_end_to_end import phos, phosd

HEADERS = Path(__file__).parents[3] / "phosd" / "include"


def said(target: Target, since: int = 0) -> list[str]:
    """What the program has printed besides its values."""
    return lines_of(target.log.read_bytes()[since:])


def lines_of(text: bytes) -> list[str]:
    lines = text.decode().splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("# ")]


def wait_for(target: Target, text: str, since: int = 0) -> None:
    wait_until(
        lambda: any(line.endswith(text) for line in said(target, since)),
        f"{text!r} of {target.program}",
    )


@contextmanager
def program(folder: Path, way: str) -> Iterator[Target]:
    target = start("safe_points", folder, runtime=folder / "run", arguments=("0", way))
    try:
        target.wait_for_steps(2)
        yield target
    finally:
        target.kill()


def images(bus: str, folder: Path) -> list[str]:
    return [str(image["id"]) for image in phos(bus, folder, "images")]


def named(bus: str, folder: Path) -> list[tuple[object, object]]:
    return [(image["name"], image["number"]) for image in phos(bus, folder, "images")]


def ask(target: Target) -> None:
    (target.log.parent / "ask").touch()


def right(target: Target, way: str) -> None:
    """All that the program has computed is what it computes undisturbed."""
    values = target.values()
    expected = undisturbed("safe_points", max(values) + 1, way, compared=target)
    assert values == {step: expected[step] for step in values}


def test_a_program_saves_itself_and_goes_on_when_it_is_restored(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "saves") as target:
        target.wait_for_steps(105)
        wait_for(target, "99 saved")
        assert said(target)[:7] == [
            *("absent None", "before", "after", "49 saved"),
            *("before", "after", "99 saved"),
        ]
        first, second = images(bus, tmp_path)
        os.kill(target.pid, signal.SIGKILL)
        target.process.wait()
        for image, step in ((second, 99), (first, 49)):
            mark = target.position()
            restored = phos(bus, tmp_path, "restore", image)[-1]
            assert restored["result"] == str(target.pid)
            target.wait_for_steps(10, since=mark)
            assert said(target, mark)[:2] == ["came back", f"{step} restored"]
            assert min(target.values(mark)) == step + 1
            target.kill()
        right(target, "saves")


def test_a_program_comes_to_its_end_with_its_own_checkpoint(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "ends") as target:
        target.process.wait(60)
        (image,) = images(bus, tmp_path)
        assert named(bus, tmp_path) == [("last", 1)]
        mark = target.position()
        phos(bus, tmp_path, "restore", image)
        wait_for(target, "5 restored", mark)
        target.wait_for_steps(5, since=mark)
        right(target, "ends")


def test_a_program_stands_still_with_its_own_checkpoint(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "holds") as target:
        wait_until(lambda: "hold" in phase(bus, tmp_path), "the program to be held")
        assert max(target.values()) == 5 and said(target) == ["absent None"]
        phos(bus, tmp_path, "continue", str(target.pid))
        wait_for(target, "5 saved")
        target.more_steps(2)
        right(target, "holds")


@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop", "driver"])
def test_a_checkpoint_from_outside_waits_for_a_safe_point(
    bus: str, tmp_path: Path, mode: str
) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "passes") as target:
        saved = phos(bus, tmp_path, "checkpoint", str(target.pid), "--mode", mode)[-1]
        wait_for(target, "stopped")
        lines = said(target)
        assert lines[1:3] == ["before", "after"] and len(lines) == 4
        step = int(lines[3].split()[0])
        target.more_steps(5)
        target.kill()
        mark = target.position()
        phos(bus, tmp_path, "restore", str(saved["result"]))
        target.wait_for_steps(5, since=mark)
        assert said(target, mark) == ["came back", f"{step} restored"]
        assert min(target.values(mark)) == step + 1
        right(target, "passes")


def test_migration_and_suspension_wait_for_safe_points_too(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "passes") as target:
        pid = str(target.pid)
        for words in (
            ["migrate", pid, "--to", "1"],
            ["migrate", pid, "--to", "0", "--mode", "driver"],
        ):
            mark = target.position()
            phos(bus, tmp_path, *words)
            wait_for(target, "stopped", mark)
            assert said(target, mark)[:2] == ["before", "after"]
        mark = target.position()
        phos(bus, tmp_path, "suspend", pid)
        assert said(target, mark) == ["before"]
        phos(bus, tmp_path, "resume", pid)
        wait_for(target, "stopped", mark)
        assert said(target, mark)[:2] == ["before", "after"]
        target.more_steps(3)
        right(target, "passes")


def refused(bus: str, folder: Path, *words: str) -> str:
    """What is wrong with a command of ``phos``."""
    done = subprocess.run(
        [sys.executable, "-m", "phosd.cli.main", "--bus", bus, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PHOS_RUNTIME_DIR": str(folder / "run")},
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_a_program_that_comes_to_no_safe_point_is_left_alone(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "seldom") as target:
        words = ("checkpoint", str(target.pid), "--callback-deadline", "0.5")
        error = refused(bus, tmp_path, *words)
        assert f"process {target.pid} came to no safe point within 0.5 s" in error
        assert "callback_deadline" in error or "--callback-deadline" in error
        target.more_steps(2)
        assert images(bus, tmp_path) == []
        phos(bus, tmp_path, *words, "--without-callbacks")
        assert len(images(bus, tmp_path)) == 1
        # Its wait has ended with the job: the next safe point is passed by.
        (tmp_path / "come").touch()
        target.more_steps(3)
        assert said(target) == ["absent None"]
        phos(bus, tmp_path, *words)
        wait_for(target, "stopped")
        right(target, "seldom")


def test_a_callable_that_raises_fails_what_was_asked_for(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "raises") as target:
        error = refused(bus, tmp_path, "checkpoint", str(target.pid))
        assert "not ready to be stopped: raises.<locals>.broken raised" in error
        assert "no room for the last words" in error
        target.more_steps(3)
        assert "RuntimeWarning: not saved" in target.errors.read_text()
        assert images(bus, tmp_path) == [] and "after" in said(target)
        (tmp_path / "mended").touch()
        phos(bus, tmp_path, "checkpoint", str(target.pid))
        right(target, "raises")


def test_a_callable_that_hangs_is_not_waited_for_for_ever(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "hangs") as target:
        words = ("checkpoint", str(target.pid), "--callback-deadline", "1")
        assert "came to no safe point within 1 s" in refused(bus, tmp_path, *words)
        assert said(target)[-1] == "hangs"
        (tmp_path / "come").touch()
        target.more_steps(3)
        assert not any(line.endswith("stopped") for line in said(target))
        phos(bus, tmp_path, *words)
        wait_for(target, "stopped")
        right(target, "hangs")


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("forks", "child None None"),
        ("computes", "before"),
        ("asks_again", "nested None"),
    ],
)
def test_what_callables_may_do(bus: str, tmp_path: Path, way: str, line: str) -> None:
    with phosd(bus, tmp_path), program(tmp_path, way) as target:
        phos(bus, tmp_path, "checkpoint", str(target.pid))
        wait_for(target, "stopped")
        assert line in said(target)
        target.more_steps(3)
        right(target, way)


def test_ten_threads_share_an_image(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "threads") as target:
        wait_for(target, "calls 1")
        assert said(target).count("thread saved") == 10
        (image,) = images(bus, tmp_path)
        target.more_steps(2)
        target.kill()
        mark = target.position()
        phos(bus, tmp_path, "restore", image)
        wait_for(target, "calls 1", mark)
        assert said(target, mark).count("thread restored") == 10
        target.wait_for_steps(3, since=mark)
        right(target, "threads")


def test_ranks_that_ask_together_share_an_image(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path):
        target = start("ring", tmp_path, runtime=tmp_path / "run", arguments=("0", "apart", "asks"))
        try:
            wait_until(lambda: len(said(target)) == 4, "all ranks to be saved")
            assert sorted(said(target)) == [f"rank {rank} saved" for rank in range(4)]
            (image,) = images(bus, tmp_path)
            wait_until(
                lambda: (
                    sorted(str(job["state"]) for job in phos(bus, tmp_path, "jobs"))
                    == ["cancelled"] * 3 + ["done"]
                ),
                "the end of the jobs that were not needed",
            )
            target.more_steps(3)
            target.kill()
            mark = target.position()
            phos(bus, tmp_path, "restore", image)
            wait_until(lambda: len(said(target, mark)) == 4, "all ranks to be restored")
            assert sorted(said(target, mark)) == [f"rank {rank} restored" for rank in range(4)]
            target.wait_for_steps(3, since=mark)
        finally:
            target.kill()
        ring_computed_right(target)


def ring_computed_right(target: Target) -> None:
    values = target.values()
    expected = undisturbed("ring", max(values) + 1, hooked=True)
    assert values == {step: expected[step] for step in values}


def wait_for_ranks(target: Target, since: int) -> None:
    wait_until(lambda: len(said(target, since)) == 4, "all ranks to go on")


def test_ranks_that_wait_for_each_other_come_to_one_safe_point(bus: str, tmp_path: Path) -> None:
    """However they came to theirs: in each step they wait for each other."""
    with phosd(bus, tmp_path):
        words = ("0", "apart", "passes")
        target = start("ring", tmp_path, runtime=tmp_path / "run", arguments=words)
        try:
            for _ in range(3):
                target.more_steps(2)
                mark = target.position()
                saved = phos(bus, tmp_path, "checkpoint", str(target.pid))[-1]
                wait_for_ranks(target, mark)
                (step,) = {line.split()[-1] for line in said(target, mark)}
            target.more_steps(2)
            target.kill()
            mark = target.position()
            phos(bus, tmp_path, "restore", str(saved["result"]))
            wait_for_ranks(target, mark)
            assert sorted(said(target, mark)) == [f"rank {n} restored {step}" for n in range(4)]
            target.wait_for_steps(3, since=mark)
        finally:
            target.kill()
        ring_computed_right(target)


def test_nothing_is_asked_for_while_a_stream_is_captured(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path), program(tmp_path, "captures") as target:
        target.wait_for_steps(8)
        assert said(target)[1:] == [
            "Unsupported Unsupported: a stream capture is under way; ask when it has ended",
            "passed None",
        ]
        assert images(bus, tmp_path) == []
        right(target, "captures")


def test_without_phosd_nothing_happens(bus: str, tmp_path: Path) -> None:
    with program(tmp_path, "asks") as target:
        ask(target)
        wait_for(target, " None", target.position())
        with phosd(bus, tmp_path):
            mark = target.position()
            ask(target)
            wait_for(target, " saved", mark)
        mark = target.position()
        ask(target)
        wait_for(target, " None", mark)
        assert not (tmp_path / "run/program.sock").exists()
        right(target, "asks")


@contextmanager
def busy_phosd(bus: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A phosd with one job at a time, and that waits for a safe point that does not come."""
    (folder / "other").mkdir()
    (folder / "phosd.toml").write_text("max_jobs = 1\ncallback_deadline = 600\n")
    other = start(
        "safe_points", folder / "other", runtime=folder / "run", arguments=("0", "seldom")
    )
    try:
        other.wait_for_steps(2)
        with phosd(bus, folder) as daemon:
            words = ("call", "org.phos", "/org/phos", "org.phos.Manager1", "Checkpoint", "ua{sv}")
            busctl(bus, *words, str(other.pid), "0")
            wait_until(lambda: "safe-point" in phase(bus, folder), "the job to wait")
            yield daemon
    finally:
        other.kill()


def wait_for_jobs(bus: str, folder: Path, count: int) -> None:
    wait_until(lambda: len(phos(bus, folder, "jobs")) == count, f"{count} jobs")


def phase(bus: str, folder: Path) -> str:
    jobs = phos(bus, folder, "jobs")
    return str([job.get("phase") for job in jobs])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_phosd_ends_while_a_program_waits(bus: str, tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path, "asks") as target:
        with suppress(AssertionError), busy_phosd(bus, tmp_path) as daemon:
            ask(target)
            wait_for(target, "asks")
            wait_for_jobs(bus, tmp_path, 2)
            daemon.send_signal(number)
            daemon.wait(60)
        expected = "Cancelled" if number == signal.SIGTERM else "NoSuchProcess"
        wait_until(lambda: any(line.startswith(expected) for line in said(target)), expected)
        target.more_steps(2)
        mark = target.position()
        with phosd(bus, tmp_path):
            ask(target)
            wait_for(target, " saved", mark)
        right(target, "asks")


def test_a_phosd_that_was_started_anew_knows_of_no_wish(bus: str, tmp_path: Path) -> None:
    with program(tmp_path, "asks") as target:
        with suppress(AssertionError), busy_phosd(bus, tmp_path) as daemon:
            ask(target)
            wait_for_jobs(bus, tmp_path, 2)
            os.kill(target.pid, signal.SIGSTOP)
            daemon.kill()
            daemon.wait(60)
        with phosd(bus, tmp_path):
            os.kill(target.pid, signal.SIGCONT)
            wait_until(lambda: "phosd ended, or was restarted" in str(said(target)), "its error")
            target.more_steps(2)
        right(target, "asks")


def test_a_wait_is_interrupted_by_signals(bus: str, tmp_path: Path) -> None:
    with program(tmp_path, "asks") as target, busy_phosd(bus, tmp_path):
        for number in range(2):
            mark = target.position()
            ask(target)
            wait_for_jobs(bus, tmp_path, number + 2)
            os.kill(target.pid, signal.SIGINT)
            wait_for(target, "interrupted", mark)
            target.more_steps(2)
        ask(target)
        wait_for(target, "asks", target.position())
        os.kill(target.pid, signal.SIGTERM)
        assert target.process.wait(60) == -signal.SIGTERM


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not alive(pid), f"the end of process {pid}")


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C program, from a header that every compiler takes."""
    folder = tmp_path_factory.mktemp("in-c")
    alone = folder / "alone.c"
    alone.write_text("#include <phos.h>\n")
    strict = ["-Wall", "-Wextra", "-Werror", "-I", str(HEADERS)]
    for words in (["-std=c99"], ["-std=gnu17"], ["-x", "c++", "-std=c++11"]):
        subprocess.run(["cc", *strict, *words, "-fsyntax-only", str(alone)], check=True)
    built = folder / "safe_points"
    flags = ["-D_DEFAULT_SOURCE", "-std=c11", "-pedantic", "-O1", "-o", str(built)]
    subprocess.run(["cc", *strict, *flags, str(PROGRAMS / "safe_points.c"), "-ldl"], check=True)
    return built


def test_a_program_in_c(bus: str, tmp_path: Path, in_c: Path) -> None:
    steps = 150
    command = [str(in_c), str(steps)]
    alone = subprocess.run(
        command, env=environment(hooked=False), capture_output=True, check=True
    ).stdout
    assert lines_of(alone) == ["before CUDA 0", "20 0"]
    expected = parse(alone)
    log = tmp_path / "log"
    with phosd(bus, tmp_path), log.open("ab") as out:
        with running(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            env=environment(hooked=True, runtime=tmp_path / "run"),
            start_new_session=True,
        ) as process:
            wait_until(lambda: "20 1" in lines_of(log.read_bytes()), "its own image")
            saved = phos(bus, tmp_path, "checkpoint", str(process.pid))[-1]
            wait_until(lambda: len(lines_of(log.read_bytes())) == 3, "the image from outside")
            assert lines_of(log.read_bytes())[2].endswith(" 3")
            own, other = images(bus, tmp_path)
            assert named(bus, tmp_path) == [("in_c", 1), (None, None)]
            assert other == saved["result"]
            process.wait(60)
        assert parse(log.read_bytes()) == expected
        for image, first in ((own, 21), (other, 22)):
            mark = log.stat().st_size
            pid = int(str(phos(bus, tmp_path, "restore", image)[-1]["result"]))
            wait_for_end(pid)
            since = log.read_bytes()[mark:]
            assert lines_of(since)[0].endswith(" 2")
            values = parse(since)
            assert min(values) >= first and max(values) == steps - 1
            assert values == {step: expected[step] for step in values}
