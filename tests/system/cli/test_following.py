"""``phos restore --follow`` prints what a program writes from then on."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from phosd.cli.following import Output
from phosd.cli.main import main
from phosd.cli.settings import Settings

PROGRAM = "read go; echo one; echo two >&2; sleep 0.3; printf three"


@pytest.fixture
def program(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """It writes to two files, of which one has something already, when it is told to."""
    (tmp_path / "out").write_text("before\n")
    with (tmp_path / "out").open("ab") as out, (tmp_path / "err").open("ab") as err:
        started = subprocess.Popen(
            ["sh", "-c", PROGRAM], stdin=subprocess.PIPE, stdout=out, stderr=err
        )
    yield started
    started.kill()
    started.communicate()


def places(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "out"), str(tmp_path / "err")]


def test_it_ends_with_the_program(
    program: "subprocess.Popen[bytes]", tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written = Output(places(tmp_path))
    assert program.stdin is not None
    program.stdin.write(b"go\n")
    program.stdin.close()
    written.show(Settings(), program.pid)
    assert capfd.readouterr() == ("one\nthree", "two\n")


def test_ctrl_c_leaves_the_program_alone(
    program: "subprocess.Popen[bytes]", tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    Output(places(tmp_path)).show(Settings(), program.pid)
    assert program.poll() is None
    assert capfd.readouterr().err == (
        f"phos: process {program.pid} goes on, and so does its output\n"
    )


def test_what_is_no_file_is_left_out(
    program: "subprocess.Popen[bytes]", tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing waits for who writes to a pipe; and a program that has ended already is no error."""
    os.mkfifo(tmp_path / "fifo")
    program.kill()
    program.wait()
    Output([str(tmp_path / "fifo"), str(tmp_path / "gone")]).show(Settings(), program.pid)
    Output([]).show(Settings(), os.getpid())
    assert capfd.readouterr() == ("", "phos: it has no output files to follow\n")


@pytest.mark.parametrize("words", [("--clone",), ("--dry-run",), ("--json",)])
def test_it_is_for_one_program_and_for_people(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, ["restore", "latest", "--follow", *words], prog_name="phos")
    assert (done.exit_code, "--follow is for one program" in done.output) == (2, True), done.output
