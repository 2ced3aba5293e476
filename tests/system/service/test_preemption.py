"""Programs that survive their preemption, by one line that is the same each time."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.program.tree import scan
from phosd.engine.system import procfs
from phosd.errors import NoSuchProcess
from tests.support.harness import PROGRAMS, alive, parse, undisturbed, wait_until
from tests.system.cli.test_grace import slurm
from tests.system.service.test_end_to_end import phos, phosd

SAVED = 75
STEPS = 500
ENDING = f"""
import runpy, sys
sys.argv = ["single.py", *sys.argv[1:]]
sys.path.insert(0, {str(PROGRAMS)!r})
runpy.run_path({str(PROGRAMS / "single.py")!r}, run_name="__main__")
sys.exit(7)
"""


class Line:
    """The line that starts a program or goes on with it, and what it has shown so far."""

    def __init__(self, bus: str, folder: Path, *options: str, name: str = "bert") -> None:
        self._bus, self._folder = bus, folder
        self.variables: dict[str, str] = {}
        self._words = ["--name", name, "--resume", "--on-term=save", *options]
        self._program = folder / "program.py"
        self._program.write_text(ENDING)
        self.steps = STEPS
        self._shown = folder / f"{name}.shown"
        self._said = folder / f"{name}.said"

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ | {
            "PHOS_RUNTIME_DIR": str(self._folder / "run"),
            "XDG_STATE_HOME": str(self._folder / "home"),
            "PHOS_BUS": self._bus,
            **self.variables,
        }

    def start(self, *program: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "phosd.cli.main", "run", "--gpu", "soft", *self._words]
        words = program or (sys.executable, str(self._program), str(self.steps))
        with self._shown.open("ab") as out, self._said.open("ab") as err:
            return subprocess.Popen(
                [*command, "--", *words], stdout=out, stderr=err, env=self.environment
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def values(self) -> dict[int, str]:
        """Return the line of each step that was shown last."""
        return parse(self._shown.read_bytes())

    def program(self) -> int:
        """The first process of the program, by what the last start said."""
        told = [line for line in self.said.splitlines() if "process " in line and "phos:" in line]
        return int(told[-1].partition("process ")[2].split(";")[0].split()[0])

    def has_shown(self, step: int) -> bool:
        return max(self.values(), default=-1) >= step

    def wait_for(self, steps: int, last: int = sys.maxsize) -> None:
        """Wait for so many steps more, or the ``last`` one, however slow each is on a busy disk."""
        at = max(self.values(), default=-1)
        try:
            for goal in range(at + 1, min(at + steps, last) + 1):
                wait_until(partial(self.has_shown, goal), "a step")
        except AssertionError as error:
            raise AssertionError(self.said) from error


@contextmanager
def nothing_left(line: Line) -> Iterator[None]:
    """Whatever happens, the program does not stay."""
    try:
        yield
    finally:
        with suppress(NoSuchProcess, IndexError, ValueError):
            for each in scan(line.program()).living:
                os.kill(each.pid, signal.SIGKILL)


def to_the_relay(relay: int, program: int) -> None:
    """As systemd with KillMode=mixed, or a shell."""
    os.kill(relay, signal.SIGTERM)


def to_all(relay: int, program: int) -> None:
    """As systemd with KillMode=control-group, and Slurm; the program may be the first."""
    for pid in (*[each.pid for each in scan(program).living], relay):
        os.kill(pid, signal.SIGTERM)


def to_the_program(relay: int, program: int) -> None:
    """As somebody who takes the program's pid from a list."""
    os.kill(program, signal.SIGTERM)


def test_ten_preemptions_at_random_instants(bus: str, tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("PHOS_TEST_SEED", "1")))
    line = Line(bus, tmp_path, "--in-memory")
    line.steps = 3 * STEPS
    (tmp_path / "phosd.toml").write_text('memory_tier = "1 GiB"\n')
    in_an_hour = (datetime.now() + timedelta(hours=1)).isoformat(timespec="seconds")
    line.variables = slurm(tmp_path, preempted="2026-11-25T20:47:07", end=in_an_hour)
    ways = [to_the_relay, to_all, to_the_program]
    with phosd(bus, tmp_path), nothing_left(line):
        preempted = 0
        while True:
            relay = line.start()
            if preempted == 10:
                assert relay.wait(120) == 7, line.said
                break
            line.wait_for(1)
            with suppress(subprocess.TimeoutExpired):
                relay.wait(chance.uniform(0.0, 0.3))
            ways[preempted % 3](relay.pid, line.program())
            assert relay.wait(60) == SAVED, line.said
            preempted += 1
        assert line.said.count(", for up to 47 s\nphos: preempted: there are ") == 10
        assert line.said.count("lost if the machine ends before phosd has written it") == 10
        images = phos(bus, tmp_path, "images")
        assert [(i["name"], i["number"]) for i in images] == [("bert", n) for n in range(1, 11)]
        phases: list[Any] = [job["phases"] for job in phos(bus, tmp_path, "history")]
        stops = {each["name"] for job in phases for each in job if each["stopped"]}
        assert "write" not in stops, "it waited for the disk"
    values = line.values()
    expected = undisturbed("single", line.steps)
    assert values == {step: expected[step] for step in range(line.steps)}


def test_saved_by_hand_and_run_again_after_its_end(bus: str, tmp_path: Path) -> None:
    """What has come to its end is not done twice, as by a unit that is started at each boot."""
    line = Line(bus, tmp_path)
    (tmp_path / "program.py").write_text(ENDING.replace("sys.exit(7)", ""))
    with phosd(bus, tmp_path), nothing_left(line):
        relay = line.start()
        line.wait_for(2)
        phos(bus, tmp_path, "checkpoint", str(line.program()), "--end")
        assert relay.wait(60) == SAVED, line.said
        assert line.start().wait(120) == 0, line.said
        values = line.values()
        assert len(values) == STEPS
        shown = (tmp_path / "bert.shown").read_bytes()
        assert line.start().wait(60) == 0
        assert "bert has ended with 0" in line.said
        assert (tmp_path / "bert.shown").read_bytes() == shown
        phos(bus, tmp_path, "rm", "bert")
        again = line.start()
        file = tmp_path / "bert.shown"
        wait_until(lambda: file.read_bytes() != shown, "it to begin anew")
        os.kill(again.pid, signal.SIGTERM)
        assert again.wait(60) == SAVED, line.said


def test_what_is_in_the_way_of_going_on(bus: str, tmp_path: Path) -> None:
    line = Line(bus, tmp_path, "--no-pidns")
    with phosd(bus, tmp_path), nothing_left(line):
        relay = line.start()
        line.wait_for(2)
        pid = line.program()
        second = line.start()  # one of a name
        assert second.wait(60) == 5
        assert "another `phos run` starts bert" in line.said
        relay.kill()
        relay.wait()
        assert alive(pid), "it does not end with its relay"
        third = line.start()
        assert third.wait(60) == 5
        assert f"bert runs already: process {pid}" in line.said
        assert line.said.count("the software GPU") <= 1, "told by the one that started it"
        (shown,) = [row for row in phos(bus, tmp_path, "ps") if row["pid"] == pid]
        assert shown["name"] == "bert"
        phos(bus, tmp_path, "checkpoint", str(pid), "--end")
        other = line.start("sh", "-c", "exit 9")
        assert other.wait(60) == 6
        assert "bert@1" in line.said and "was started by another command" in line.said
        # Its pid is taken: that passes, so it is told as such.
        with holder_of(pid):
            fourth = line.start()
            assert fourth.wait(60) == 5, line.said
            assert f"the process needs id {pid}" in line.said
        fifth = line.start()
        line.wait_for(2)
        waiting = subprocess.Popen(
            [sys.executable, "-m", "phosd.cli.main", "--json", "wait", "bert"],
            stdout=subprocess.PIPE,
            env=line.environment,
        )
        assert fifth.wait(120) == 7, line.said
        told, _ = waiting.communicate(timeout=60)
        assert waiting.returncode == 7
        assert json.loads(told) == {"pid": pid, "status": 7}
    expected = undisturbed("single", STEPS)
    values = line.values()
    assert values == {step: expected[step] for step in values}


@contextmanager
def holder_of(pid: int) -> Iterator[None]:
    """Another process with this pid."""
    wait_until(lambda: procfs.stat(pid) is None, "the pid to be free")
    for _ in range(2000):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        child = subprocess.Popen(["sleep", "1000"])
        if child.pid == pid:
            break
        child.kill()
        child.wait()
    assert child.pid == pid
    # The next processes must not get the ids of the program's threads.
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid + 1000))
    try:
        yield
    finally:
        child.kill()
        child.wait()


def said_again(line: Line, times: int) -> bool:
    return line.said.splitlines().count("again") == times


def test_the_loop_of_a_shell(bus: str, tmp_path: Path) -> None:
    """As docs/operate/preemption.md has it; the notice of the end comes twice."""
    line = Line(bus, tmp_path)
    page = (Path(__file__).parents[3] / "docs/operate/preemption.md").read_text()
    (recipe,) = [each for each in page.splitlines() if each.startswith("until phos run")]
    loop = recipe.replace("python train.py", f"{sys.executable} {tmp_path / 'program.py'} {STEPS}")
    loop = loop.replace("sleep 5", "echo again >&2").replace("phos run", "phos run --gpu soft")
    script = f'phos() {{ {sys.executable} -m phosd.cli.main "$@"; }}\n{loop}\n'
    with phosd(bus, tmp_path), nothing_left(line):
        shown, said = tmp_path / "bert.shown", tmp_path / "bert.said"
        with shown.open("ab") as out, said.open("ab") as err:
            shell = subprocess.Popen(
                ["sh", "-c", script], stdout=out, stderr=err, env=line.environment
            )
        for number in (1, 2):
            wait_until(line.values, "its first values")
            line.wait_for(2)
            below = [each.pid for each in scan(shell.pid).living]
            relays = [pid for pid in below if (at := procfs.stat(pid)) and at.parent == shell.pid]
            os.kill(relays[0], signal.SIGTERM)
            wait_until(partial(said_again, line, number), "the next turn")
        assert shell.wait(120) == 0
        assert said_again(line, 2)
    expected = undisturbed("single", STEPS)
    assert line.values() == {step: expected[step] for step in range(STEPS)}


def test_sigterm_while_it_is_restored(bus: str, tmp_path: Path) -> None:
    """It cancels that, and one that comes too late for that saves the program again."""
    line = Line(bus, tmp_path)
    with nothing_left(line):
        with phosd(bus, tmp_path):
            relay = line.start()
            line.wait_for(2)
            pid = line.program()
            os.kill(relay.pid, signal.SIGTERM)
            assert relay.wait(60) == SAVED, line.said
        with phosd(bus, tmp_path, PHOS_FAULT_DELAY="12"):
            relay = line.start()
            wait_until(lambda: restores(bus, tmp_path), "the restore to begin")
            os.kill(relay.pid, signal.SIGTERM)
            assert relay.wait(120) == SAVED, line.said
            assert not alive(pid), "what was restored of it is left"
            (state,) = restores(bus, tmp_path)
            images = phos(bus, tmp_path, "images")
            assert (state, len(images)) == ("cancelled", 1), line.said
        with phosd(bus, tmp_path):
            said = len(line.said)
            relay = line.start()
            wait_until(lambda: "goes on as process" in line.said[said:], "it to go on")
            os.kill(relay.pid, signal.SIGTERM)  # before it is followed
            assert relay.wait(60) == SAVED, line.said
            assert line.start().wait(120) == 7, line.said
    expected = undisturbed("single", STEPS)
    assert line.values() == {step: expected[step] for step in range(STEPS)}


def restores(bus: str, folder: Path) -> list[object]:
    """The states of all restores that this phosd has begun."""
    return [job["state"] for job in phos(bus, folder, "jobs") if job["operation"] == "restore"]


def test_who_cannot_be_saved_in_time_is_terminated(bus: str, tmp_path: Path) -> None:
    """A program without CUDA is not saved; with a handler it ends by it, with its own code."""
    line = Line(bus, tmp_path, "--grace=30")
    script = "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.01; done"
    with phosd(bus, tmp_path), nothing_left(line):
        relay = line.start("sh", "-c", script)
        wait_until(lambda: "up" in (tmp_path / "bert.shown").read_text(), "it to start")
        os.kill(line.program(), signal.SIGTERM)
        os.kill(relay.pid, signal.SIGTERM)
        os.kill(relay.pid, signal.SIGTERM)
        assert relay.wait(60) == 4, line.said
        assert (tmp_path / "bert.shown").read_text() == "up\nbye\n"
        assert "not saved" in line.said


def test_a_suspended_program_is_brought_back_to_be_saved(bus: str, tmp_path: Path) -> None:
    line = Line(bus, tmp_path)
    with phosd(bus, tmp_path), nothing_left(line):
        relay = line.start()
        line.wait_for(2)
        phos(bus, tmp_path, "suspend", "bert")
        os.kill(relay.pid, signal.SIGTERM)
        assert relay.wait(60) == SAVED, line.said
        assert "is suspended; it is resumed first" in line.said
        (failed,) = [row for row in phos(bus, tmp_path, "history") if row["state"] == "failed"]
        assert failed["error"] == "Busy"
        assert line.start().wait(120) == 7, line.said
    expected = undisturbed("single", STEPS)
    assert line.values() == {step: expected[step] for step in range(STEPS)}


def test_without_phosd_nothing_is_started_that_may_have_an_image(tmp_path: Path) -> None:
    line = Line("unix:path=/nowhere", tmp_path)
    (tmp_path / "run" / "hook").mkdir(parents=True)
    assert line.start("touch", str(tmp_path / "started")).wait(60) == 1
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--resume"], "give --name"),
        (["--detach", "--on-term=save"], "--detach leaves nobody"),
        (["--grace=5"], "give --on-term=save"),
        (["--in-memory"], "give --on-term=save"),
        (["--name=4711"], "can be no name"),
        (["--name=latest"], "can be no name"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], why: str) -> None:
    command = [sys.executable, "-m", "phosd.cli.main", "run", *words, "--", "true"]
    done: Any = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr
