"""``phos run`` when the disk is full to which its program's output goes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.cli.run_command import output_room
from phosd.cli.run_command.output_room import AHEAD
from tests.support.harness import users_hooks, wait_until

RUN = [sys.executable, "-m", "phosd.cli.main", "run"]
MUCH = "while True: print('step', 'x' * 1000, flush=True)"
LITTLE = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    print("step", flush=True)
    time.sleep(0.01)
print("done", flush=True)
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home of a user, on a disk of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", disk], check=False
    ).returncode:
        pytest.skip("this root may not mount")
    users_hooks(tmp_path / "run")
    monkeypatch.setenv("XDG_STATE_HOME", str(disk / "state"))
    monkeypatch.setenv("PHOS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PHOS_GPU", "soft")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> Path:
    """Write a file until the disk is full."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(1 << 12))
    return filler


def test_a_program_that_fills_the_disk(small: Path) -> None:
    """Its own write fails, and it has room to say so."""
    words = [*RUN, "--", sys.executable, "-c", MUCH]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 120)  # 120: what it had left to print fails as it ends
    assert "phos: there is no room for the output of process" in done.stderr
    assert "OSError: [Errno 28] No space left on device\n" in done.stderr, "its own words"
    said = done.stderr.splitlines()[-1]
    assert "has ended while there was no room for its output in" in said and "make room" in said
    assert done.stdout.splitlines()[-2] == "step " + "x" * 1000


def test_a_program_goes_on_when_there_is_room_again(small: Path, tmp_path: Path) -> None:
    said, shown, go = tmp_path / "said", tmp_path / "shown", tmp_path / "go"
    words = [*RUN, "--", sys.executable, "-c", LITTLE, str(go)]
    with (
        said.open("wb") as err,
        shown.open("wb") as out,
        subprocess.Popen(words, stdout=out, stderr=err) as process,
    ):
        try:
            wait_until(lambda: "its output is kept in" in said.read_text(), "it to start")
            (folder,) = (small / "state/phos/run").iterdir()
            kept = folder / "stdout"
            wait_until(lambda: blocks(kept) >= AHEAD, "its room")
            filler = fill(small)
            with kept.open("ab") as file:  # more than the rest of a page
                file.write(b"\n" * (AHEAD // 2))
            wait_until(lambda: "there is no room" in said.read_text(), "it to be told")
            size = kept.stat().st_size
            wait_until(lambda: kept.stat().st_size > size, "it to print more")
            filler.unlink()
        finally:
            go.touch()
    assert (process.returncode, shown.read_bytes().endswith(b"step\ndone\n")) == (0, True)
    assert "has ended" not in said.read_text()
    assert blocks(kept) < kept.stat().st_size + (1 << 14), "its room was not given back"


def blocks(file: Path) -> int:
    return file.stat().st_blocks * 512


@pytest.mark.parametrize("options", [[], ["--detach"], ["--name", "bert", "--no-pidns"]])
def test_a_program_is_not_started_without_room(small: Path, options: list[str]) -> None:
    (small / "state").mkdir()
    fill(small)
    done = subprocess.run([*RUN, *options, "--", "true"], capture_output=True, text=True)
    assert done.returncode == 5
    assert "was not started: there is no room for its output in" in done.stderr
    assert "No space left on device" in done.stderr and "XDG_STATE_HOME" in done.stderr
    assert list((small / "state/phos/run").iterdir()) == []


def test_what_is_shown_has_no_room(small: Path) -> None:
    """The program goes on, and its output is kept."""
    with Path("/dev/full").open("wb") as out:
        words = [*RUN, "--", "sh", "-c", "echo up; sleep 0.2; echo done"]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0
    (told,) = [line for line in done.stderr.splitlines() if "cannot be shown" in line]
    kept = Path(told.rpartition(" ")[2])
    assert "No space left on device" in told and kept.read_text() == "up\ndone\n"


def test_room_is_not_given_back_while_others_write(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they write meanwhile would be cut off."""
    folder = small / "state/phos/run/one"
    folder.mkdir(parents=True)
    output = folder / "stdout"
    told: list[str] = []
    with output.open("ab") as program:
        with output_room.OutputRoom(os.getpid(), [output], told.append):
            program.write(b"step\n")
            program.flush()
        assert blocks(output) >= AHEAD
    with output_room.OutputRoom(os.getpid(), [output], told.append):
        assert blocks(output) >= AHEAD
    assert (blocks(output) < AHEAD, output.read_bytes(), told) == (True, b"step\n", [])
