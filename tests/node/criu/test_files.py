"""Files that changed between checkpoint and restore."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from phosd.engine.criu.dump import file_records
from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.program import Criu
from phosd.engine.system import procfs
from phosd.errors import Internal, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, in_order
from tests.node.criu.test_file_worker import WRITER

READER = """
data = open("data")
data.readline()
"""

DATABASE = """
import sqlite3
connection = sqlite3.connect("data.sqlite", isolation_level=None)
connection.execute("create table t (x)")
file = open("data.sqlite", "r+b")
"""


@pytest.mark.parametrize("uid", [0, USER])
def test_an_append_log_just_works(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.counts_on(by=20)
    life.kill()
    before = life.log.read_bytes()
    life.restore()
    life.counts_on()
    assert life.log.read_bytes().startswith(before)


def grown(life: Life) -> Path:
    """A written file that has grown since the checkpoint, and its program killed."""
    life.start(WRITER)
    written = life.home / "written"
    life.counts_on(written)
    life.dump()
    life.counts_on(written)
    life.kill()
    return written


def test_a_grown_file_is_refused_if_so_chosen(life: Life) -> None:
    written = grown(life)
    before = written.read_bytes()
    with pytest.raises(Unsupported, match=r"written has grown by \d+ B \(`--files cut"):
        life.restore(files=Policy.KEEP)
    assert written.read_bytes() == before


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("policy", [Policy.CUT, Policy.ROLLBACK])
def test_a_grown_file_is_cut(policy: Policy, lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    written = grown(life)
    before = written.read_bytes()
    life.restore(files=policy).settle()
    values = life.counts_on(written)
    assert values == list(range(1, len(values) + 1)), "as if nothing had happened"
    (tail,) = life.home.glob("written.phos-tail-*")
    assert before.endswith(tail.read_bytes())
    assert tail.stat().st_uid == uid
    assert tail.stat().st_size > 0


def own_file(life: Life, name: str) -> Path:
    """A file of the program's user, before the program is started."""
    path = life.home / name
    path.write_bytes(b"before" * 10)
    os.chown(path, life.uid, life.uid)
    return path


HOLDS_BOTH = """
import os
read, both = os.open("read", os.O_RDONLY), os.open("both", os.O_RDWR)
os.lseek(both, 5, os.SEEK_SET)
"""


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("size", [0, 3, 300])
def test_a_program_goes_on_with_files_as_they_are(
    lives: Callable[[int], Life], uid: int, size: int
) -> None:
    """They are smaller or larger by now; nothing of them is changed or left beside."""
    life = lives(uid)
    paths = [own_file(life, name) for name in ("read", "both")]
    life.start(HOLDS_BOTH + COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    for path in paths:
        path.write_bytes(b"x" * size)
    restored = life.restore(files=Policy.AS_IS)
    restored.settle()
    life.counts_on()
    assert [path.read_bytes() for path in paths] == [b"x" * size] * 2
    (both,) = [d for d in procfs.descriptors(restored.pid) if d.target == str(paths[1])]
    assert both.position == 5
    assert not list(life.home.glob("*.phos-*"))


def test_a_file_that_is_gone_is_not_as_it_is(life: Life) -> None:
    own_file(life, "read")
    gone = own_file(life, "both")
    life.start(HOLDS_BOTH + COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    gone.unlink()
    with pytest.raises(Unsupported, match="both is gone"):
        life.restore(files=Policy.AS_IS)


@pytest.mark.parametrize("uid", [0, USER])
def test_a_log_that_is_gone_is_made_anew(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    life.log.unlink()
    with pytest.raises(Unsupported, match="log is gone"):
        life.restore(files=Policy.KEEP)
    assert not life.log.exists()
    assert life.told() == (f"{life.log}, which is gone, is made anew, empty",)
    life.restore(files=Policy.ROLLBACK).settle()
    life.counts_on()
    status = life.log.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (uid, 0o644)


@pytest.mark.parametrize("size", [0, 3])
def test_a_log_that_is_shorter_and_has_other_rights_by_now_is_continued(
    life: Life, size: int
) -> None:
    """Somebody has rotated it, and made it readable for a group."""
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    os.truncate(life.log, size)
    life.log.chmod(0o640)
    said = f"{life.log} is shorter than at the checkpoint, and is continued at its end"
    assert life.told() == (said,)
    life.restore().settle()
    life.counts_on()
    assert life.log.stat().st_mode & 0o777 == 0o640


def broken_criu(life: Life) -> Criu:
    """A CRIU that fails when it restores."""
    path = life.home / "criu"
    path.write_text("#!/bin/sh\n[ $1 = --version ] && echo Version: 9 && exit\nexit 3\n")
    path.chmod(0o755)
    return Criu(path)


@pytest.mark.parametrize("uid", [0, USER])
def test_a_cut_is_undone_when_criu_fails(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    written = grown(life)
    before = written.read_bytes()
    life.criu = broken_criu(life)
    with pytest.raises(Internal, match="criu restore failed"):
        life.restore(files=Policy.CUT)
    assert written.read_bytes() == before
    assert not list(life.home.glob("*.phos-*"))


def test_abandoning_ends_the_program_and_brings_the_files_back(life: Life) -> None:
    written = grown(life)
    before = written.read_bytes()
    life.restore(files=Policy.CUT).abandon()
    assert written.read_bytes() == before
    life.restore(files=Policy.CUT).settle()
    assert in_order(life.counts_on(written))


def test_an_overwritten_file_is_never_cut(life: Life) -> None:
    written = grown(life)
    with written.open("r+b") as file:
        file.write(b"9")
    before = written.read_bytes()
    with pytest.raises(Unsupported, match="written was overwritten"):
        life.restore(files=Policy.CUT)
    assert written.read_bytes() == before


def test_a_shrunk_file_is_refused(life: Life) -> None:
    written = grown(life)
    os.truncate(written, 2)
    with pytest.raises(Unsupported, match="written has shrunk"):
        life.restore(files=Policy.CUT)


def test_a_missing_file_is_refused(life: Life) -> None:
    grown(life).unlink()
    with pytest.raises(Unsupported, match="written is gone"):
        life.restore(files=Policy.CUT)


def test_a_fifo_in_the_place_of_a_file_is_refused(life: Life) -> None:
    written = grown(life)
    written.unlink()
    os.mkfifo(written)
    with pytest.raises(Unsupported, match="written"):
        life.restore(files=Policy.CUT)


def test_a_changed_input_is_refused(life: Life) -> None:
    data = life.home / "data"
    data.write_text("one\ntwo\n")
    life.start(READER + COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    data.write_text("one\nTWO\n")
    with pytest.raises(Unsupported, match="data has changed, and the program reads it"):
        life.restore(files=Policy.CUT)


def test_a_database_is_never_cut(life: Life) -> None:
    life.start(DATABASE + COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    database = life.home / "data.sqlite"
    with sqlite3.connect(database) as connection:
        connection.executemany("insert into t values (?)", [("x" * 1000,)] * 100)
    connection.close()
    before = database.read_bytes()
    with pytest.raises(Unsupported, match=r"data\.sqlite has changed"):
        life.restore(files=Policy.CUT)
    assert database.read_bytes() == before


def test_an_untouched_database_is_no_obstacle(life: Life) -> None:
    life.start(DATABASE + COUNTER)
    life.counts_on()
    life.again()
    assert in_order(life.counts_on())


def test_a_file_that_another_process_writes_is_not_cut(life: Life) -> None:
    written = grown(life)
    with written.open("a"), pytest.raises(Exception, match=r"uses .*written"):
        life.restore(files=Policy.CUT)


def test_a_record_without_details_is_refused(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    assert life.record is not None
    life.record = msgspec.structs.replace(life.record, details=None)
    with pytest.raises(Exception, match="says nothing about the tree"):
        life.restore()


def test_a_replaced_library_is_refused_before_anything_happens(life: Life) -> None:
    library = life.home / "library"
    library.write_bytes(bytes(8192))
    life.start(
        "import mmap\nfile = open('library', 'rb')\n"
        "code = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)\n"
        "file.close()\n" + COUNTER
    )
    life.counts_on()
    life.dump()
    life.kill()
    library.write_bytes(bytes(4096))
    with pytest.raises(Unsupported, match="library, which the program maps, was replaced"):
        life.admit()
    library.unlink()
    with pytest.raises(Unsupported, match="library, which the program maps: No such file"):
        life.admit()


LEASED = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o666)
os.write(file, b"some")
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
sys.stdin.read()
"""


def test_a_lease_holds_nobody_up(tmp_path: Path) -> None:
    """Whoever opens such a file waits for its holder, unless told not to."""
    words = [sys.executable, "-c", LEASED, str(tmp_path / "file")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"leased\n"
        began = time.monotonic()
        found = file_records.open_files(procfs.descriptors(holder.pid), Owner(0, 0, ()))
        assert time.monotonic() - began < 20
        holder.communicate()
    (file,) = (each for each in found if each.path == str(tmp_path / "file"))
    assert (file.size, file.content) == (4, None)
