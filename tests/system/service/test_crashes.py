"""A program with files of many kinds is saved, runs on, is killed, and goes on by the line that
started it. Nobody sees to its files.
"""

import hashlib
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.program.tree import scan
from phosd.units import counted
from tests.support.harness import PROGRAMS, alive, run_to_end, wait_until
from tests.support.rotation import times
from tests.system.service.test_end_to_end import phos, phosd
from tests.system.service.test_preemption import Line, nothing_left

FRAGILE = f"""
import os, runpy, sys, threading, time
def look():
    while not os.path.exists("bad"):
        time.sleep(0.01)
    time.sleep(0.5)
    os._exit(9)
threading.Thread(target=look, daemon=True).start()
sys.argv = ["single.py", *sys.argv[1:]]
sys.path.insert(0, {str(PROGRAMS)!r})
runpy.run_path({str(PROGRAMS / "single.py")!r}, run_name="__main__")
"""
"""It ends with 9 soon after there is a file ``bad``."""
PROGRAM = PROGRAMS / "bookkeeper.py"
CRASHES = times(3, everything=5, soak=10)
STEPS = 200 * CRASHES


@pytest.fixture
def books() -> Iterator[Path]:
    """A folder on a disk, which /tmp may not be."""
    folder = Path(tempfile.mkdtemp(prefix="phos-test-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def contents(folder: Path) -> dict[str, str]:
    """What is in the files, but for the log, of which some lines come again, and newer versions."""
    with sqlite3.connect(folder / "database.sqlite") as database:
        rows = database.execute("select * from steps order by rowid").fetchall()
    found = {"database": hashlib.sha256(repr(rows).encode()).hexdigest()}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith(("database", "log")) and ".phos-" not in name:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.mark.rotated(of=2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("declared", [False, True], ids=["open files", "a declared folder"])
def test_it_goes_on_where_it_was_saved(
    declared: bool, bus: str, tmp_path: Path, books: Path
) -> None:
    chance = random.Random(int(os.environ.get("PHOS_TEST_SEED", "1")))
    line = Line(bus, tmp_path, *(["--keep-files", str(books)] if declared else []))
    more = ("strict",) if declared else ()
    words = (sys.executable, str(PROGRAM), str(STEPS), str(books), *more)
    with phosd(bus, tmp_path), nothing_left(line):
        for number in range(CRASHES):
            relay = line.start(*words)
            line.wait_for(chance.randrange(1, 20), STEPS - 1)
            phos(bus, tmp_path, "checkpoint", "bert")
            line.wait_for(chance.randrange(20, 100), STEPS - 1)
            if number and line.has_shown(STEPS - 1):  # on a busy machine phosd is slow
                break
            for each in scan(line.program()).living:
                os.kill(each.pid, signal.SIGKILL)
            assert relay.wait(60) == 128 + signal.SIGKILL, (number, line.said)
        else:
            relay = line.start(*words)
        assert relay.wait(120) == 0, line.said
        assert [*books.glob("table.phos-newer-*")], line.said
        assert [*books.glob("strict/*.phos-newer-*")] or not declared, line.said
        phos(bus, tmp_path, "prune", "--files", "0s", "--yes")
        assert not [*books.rglob("*.phos-*")], line.said
    again = tmp_path / "again"
    again.mkdir()
    assert line.values() == run_to_end(PROGRAM.stem, STEPS, str(again), *more, hooked=False)
    assert contents(books) == contents(again)
    steps = [int(step) for step in (books / "log").read_text().split()]
    assert sorted({*steps}) == [*range(STEPS)]
    assert (len(steps) == STEPS) == declared  # else some come again


@pytest.mark.timeout(600)
def test_an_image_from_which_it_crashes_is_left_for_the_one_before(
    bus: str, tmp_path: Path
) -> None:
    line = Line(bus, tmp_path)
    fragile = tmp_path / "fragile.py"
    fragile.write_text(FRAGILE.replace('"bad"', repr(str(tmp_path / "bad"))))
    words = (sys.executable, str(fragile), str(STEPS))
    with phosd(bus, tmp_path), nothing_left(line):
        relay = line.start(*words)
        for _ in range(2):
            line.wait_for(5)
            phos(bus, tmp_path, "checkpoint", "bert")
        (tmp_path / "bad").touch()
        assert relay.wait(60) == 9 and "of its restore" not in line.said
        for number in range(1, 4):
            assert line.start(*words).wait(60) == 9, line.said
            then = "goes on from the one before it" if number == 3 else "tries it again"
            assert f"60 s of its restore, {number} of 3 times; the same command {then}" in line.said
            last = phos(bus, tmp_path, "images")[-1]
            assert (last["number"], last["crashes"]) == (2, number)
        events = phos(bus, tmp_path, "events", "--severity", "warning")
        told = [str(row["text"]) for row in events if row["kind"] == "crash"]
        assert [text.rpartition("restore, ")[2] for text in sorted(told)] == [
            f"{counted(number, 'time')} in a row" for number in (1, 2, 3)
        ]
        (tmp_path / "bad").unlink()
        assert line.start(*words).wait(120) == 0, line.said
        assert "phos: an older image is taken, since bert@2" in line.said
        assert "has crashed 3 times within 60 s" in line.said
        assert line.said.count("phos: bert@1") == 1


def test_an_end_while_it_is_to_be_saved_is_no_crash(bus: str, tmp_path: Path) -> None:
    """Somebody wanted it to end: it may have ended for that."""
    line = Line(bus, tmp_path)
    fragile = tmp_path / "fragile.py"
    fragile.write_text(FRAGILE.replace('"bad"', repr(str(tmp_path / "bad"))))
    words = (sys.executable, str(fragile), str(STEPS))
    with phosd(bus, tmp_path) as daemon, nothing_left(line):
        relay = line.start(*words)
        line.wait_for(2)
        phos(bus, tmp_path, "checkpoint", "bert")
        os.kill(line.program(), signal.SIGKILL)
        assert relay.wait(60) == 128 + signal.SIGKILL
        relay = line.start(*words)
        line.wait_for(2)
        program = line.program()
        daemon.send_signal(signal.SIGSTOP)
        try:
            os.kill(relay.pid, signal.SIGTERM)
            wait_until(lambda: "SIGTERM; saving" in line.said, "it to be saved")
            (tmp_path / "bad").touch()
            wait_until(lambda: not alive(program), "its end")
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert relay.wait(60) == 9, line.said
        assert "not saved" in line.said and "of its restore" not in line.said


@pytest.mark.timeout(600)
def test_its_files_come_with_an_exported_image(bus: str, tmp_path: Path, books: Path) -> None:
    line = Line(bus, tmp_path)
    words = (sys.executable, str(PROGRAM), str(STEPS), str(books))
    file = str(tmp_path / "bert.phos")
    with phosd(bus, tmp_path), nothing_left(line):
        relay = line.start(*words)
        line.wait_for(25)
        phos(bus, tmp_path, "checkpoint", "bert")
        for each in scan(line.program()).living:
            os.kill(each.pid, signal.SIGKILL)
        assert relay.wait(60) == 128 + signal.SIGKILL, line.said
        phos(bus, tmp_path, "export", "bert", file)
        phos(bus, tmp_path, "rm", "bert")
        for path in books.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        phos(bus, tmp_path, "import", file, "--trust")
        assert line.start(*words).wait(120) == 0, line.said
    again = tmp_path / "again"
    again.mkdir()
    assert line.values() == run_to_end(PROGRAM.stem, STEPS, str(again), hooked=False)
    assert contents(books) == contents(again)
