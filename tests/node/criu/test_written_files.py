"""Files that a program writes to come back with it, however they have changed since."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phosd import program
from phosd.engine.criu.dump import written_files
from phosd.engine.criu.dump.check import check
from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.kinds import named_files
from phosd.engine.criu.restore import tree_files
from phosd.engine.criu.restore.clone import Clone, CloneFiles
from phosd.engine.program import tree
from phosd.errors import Busy, Internal, OutOfSpace, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, in_order, wait_for
from tests.node.criu.test_files import broken_criu

COUNTS = """
import select, sys
number = 0
while write(number) == number:
    number += 1
    print(number, flush=True)
    select.select([], [], [], 0.02)
print(-1, flush=True)
"""
"""Prints how often ``write`` has been called, as long as it finds all that was written before."""

DATABASE = (
    """
import sqlite3
database = sqlite3.connect("data.sqlite", isolation_level=None)
database.execute("pragma journal_mode = wal")
database.execute("create table t (x)")
reader = sqlite3.connect("data.sqlite", isolation_level=None)
def write(number):
    reader.execute("begin")
    found = reader.execute("select count(*) from t").fetchone()[0]
    database.execute("insert into t values (?)", [number])
    reader.execute("commit")
    return found
"""
    + COUNTS
)
"""sqlite with a write-ahead log: its index is a file that is mapped shared and writable."""

ARRAY = (
    """
import mmap, os
file = os.open("array", os.O_RDWR | os.O_CREAT, 0o640)
os.ftruncate(file, 8192)
array = mmap.mmap(file, 8192)
os.close(file)
def write(number):
    found = int.from_bytes(array[4096:4104], "little")
    array[4096:4104] = (number + 1).to_bytes(8, "little")
    return found
"""
    + COUNTS
)
"""A file that is written through a mapping alone."""

STATE = (
    """
import os
state = os.open("folder/state", os.O_RDWR)
def write(number):
    found = int(os.pread(state, 20, 0) or 0)
    os.pwrite(state, b"%020d" % (number + 1), 0)
    return found
"""
    + COUNTS
)
"""A file that is written in place."""


def state_of(life: Life) -> Path:
    """The file of :data:`STATE`, before the program is started."""
    state = life.home / "folder" / "state"
    state.parent.mkdir()
    state.touch(0o640)
    for path in (state, state.parent):
        os.chown(path, life.uid, life.uid)
    return state


def dumped(life: Life, program: str) -> None:
    """It has been saved, has gone on, and has been killed."""
    life.start(program)
    life.counts_on()
    life.dump()
    life.counts_on(by=20)
    life.kill()


def goes_on(life: Life) -> None:
    """It finds what it had written, and nothing else."""
    assert in_order(life.counts_on(by=20))


def newer(path: Path) -> list[Path]:
    return [*path.parent.glob(f"{path.name}.phos-newer-*")]


ACCESS = "system.posix_acl_access"


def access_of(uid: int) -> bytes:
    """An access list that lets one more user read (linux/posix_acl_xattr.h)."""
    owner, user, group, mask, others, nobody = 1, 2, 4, 16, 32, 0xFFFFFFFF
    rows = [(owner, 6, nobody), (user, 4, uid), (group, 4, nobody), (mask, 4, nobody)]
    rows.append((others, 0, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


def attributes(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path)}


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("program", [DATABASE, ARRAY], ids=["database", "array"])
def test_it_finds_what_it_had_written(program: str, uid: int, lives: Callable[[int], Life]) -> None:
    life = lives(uid)
    dumped(life, program)
    name = "array" if program is ARRAY else "data.sqlite-wal"
    later = (life.home / name).read_bytes()
    life.restore().settle()
    goes_on(life)
    (kept,) = newer(life.home / name)
    assert kept.read_bytes() == later
    assert (life.home / name).stat().st_uid == uid
    assert not [*life.home.glob("*.phos-new-*"), *life.home.glob("*.phos-old-*")]
    assert not [*life.private.glob("written-*")]


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("replaced", [False, True])
def test_extended_attributes_come_back(
    replaced: bool, uid: int, lives: Callable[[int], Life]
) -> None:
    """An access list, too; the newer file keeps its own."""
    life = lives(uid)
    state = state_of(life)
    before = {"user.kept": b"\0then", ACCESS: access_of(USER + 1)}
    for name, value in before.items():
        os.setxattr(state, name, value)
    dumped(life, STATE)
    if replaced:
        state.rename(other := state.with_name("other"))
        shutil.copy(other, state)  # with its attributes
        os.chown(state, uid, uid)
    os.removexattr(state, ACCESS)
    later = {"user.kept": b"now", "user.more": b""}
    for name, value in later.items():
        os.setxattr(state, name, value)
    life.restore().settle()
    goes_on(life)
    assert attributes(state) == before
    assert attributes(newer(state)[0]) == later


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("change", ["written", "replaced", "gone", "gone with its folder", "fifo"])
def test_whatever_became_of_it(change: str, uid: int, lives: Callable[[int], Life]) -> None:
    life = lives(uid)
    state = state_of(life)
    dumped(life, STATE)
    if change == "fifo":
        state.unlink()
        os.mkfifo(state)
        os.chown(state, uid, uid)
        with pytest.raises(Unsupported, match="no regular file"):
            life.restore()
        return
    if change != "written":
        state.unlink()
    if change == "replaced":
        state.write_text("others")
        os.chown(state, uid, uid)
    if change == "gone with its folder":
        state.parent.rmdir()
    life.restore().settle()
    goes_on(life)
    status = state.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (uid, uid, 0o640)
    assert len(newer(state)) == (change in ("written", "replaced"))


def test_what_is_as_it_was_is_left_alone(life: Life) -> None:
    state = state_of(life)
    life.start("import os\nfile = os.open('folder/state', os.O_RDWR)\n" + COUNTER)
    life.counts_on()
    inode = state.stat().st_ino
    life.again().settle()
    assert in_order(life.counts_on())
    assert state.stat().st_ino == inode and newer(state) == []


@pytest.mark.parametrize("policy", [Policy.KEEP, Policy.CUT])
def test_it_is_refused_if_so_chosen(policy: Policy, life: Life) -> None:
    state = state_of(life)
    dumped(life, STATE)
    before = state.read_bytes()
    with pytest.raises(Unsupported, match=r"state has changed.*`--files rollback` puts"):
        life.restore(files=policy)
    assert state.read_bytes() == before


def test_a_restore_that_fails_leaves_the_newer_ones(life: Life) -> None:
    state = state_of(life)
    dumped(life, STATE)
    before, inode = state.read_bytes(), state.stat().st_ino
    working, life.criu = life.criu, broken_criu(life)
    with pytest.raises(Internal, match="criu restore failed"):
        life.restore()
    assert (state.read_bytes(), state.stat().st_ino) == (before, inode)
    life.criu = working
    life.restore().abandon()
    assert (state.read_bytes(), state.stat().st_ino) == (before, inode)
    assert [*state.parent.iterdir()] == [state]


def test_who_else_has_it(life: Life) -> None:
    """Another process that writes to it, or another name of it: nothing is changed."""
    state = state_of(life)
    dumped(life, STATE)
    before = state.read_bytes()
    with state.open("r+"), pytest.raises(Busy, match=r"uses .*state"):
        life.restore()
    os.link(state, life.home / "other")
    with pytest.raises(Unsupported, match="has another name"):
        life.restore()
    assert state.read_bytes() == before and newer(state) == []


def test_a_file_of_others_is_not_saved(lives: Callable[[int], Life]) -> None:
    """The program may write to it; its user may not replace it."""
    life = lives(USER)
    state = state_of(life)
    os.chown(state, 0, 0)
    state.chmod(0o666)
    dumped(life, STATE)
    assert life.record is not None and life.record.details is not None
    assert "state" not in str(life.record.details.written_files)
    with pytest.raises(Unsupported, match="state has changed"):
        life.restore()


def test_what_is_too_large_is_left_out_or_named(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_files, "MOST_WRITTEN", 10)
    monkeypatch.setattr(named_files, "MOST_WRITTEN", 10)
    state = state_of(life)
    dumped(life, STATE)
    assert life.dumped is not None and life.dumped.left_out == (str(state),)
    with pytest.raises(Unsupported, match="state has changed"):
        life.restore()
    assert newer(state) == []
    mapped = Life(life.criu, life.home, life.private, 0)
    mapped.start(ARRAY)
    mapped.counts_on(by=1)
    try:
        with pytest.raises(Unsupported, match=r"maps .*array shared and writable, which has more"):
            check(mapped.criu, tree.scan(mapped.pid))
    finally:
        mapped.end()


WRITER = (
    """
def write(number):
    found = 0
    try:
        with open("kept/checkpoint") as file:
            found = int(file.read())
    except FileNotFoundError:
        pass
    with open("kept/partial", "w") as file:
        file.write(str(number + 1))
    os.replace("kept/partial", "kept/checkpoint")
    if number % 20 == 0:
        with open(f"kept/deep/{number}", "w") as file:
            file.write(str(number))
    return found
"""
    + COUNTS
)
"""A file that is written, closed and renamed each time, and others that are made."""


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("pattern", ["kept", "kept/check*"])
def test_what_was_declared(pattern: str, uid: int, lives: Callable[[int], Life]) -> None:
    """It need not be open."""
    life = lives(uid)
    kept = life.home / "kept"
    (kept / "deep").mkdir(parents=True)
    (kept / "deep" / "older").write_text("as it was")
    for path in (kept, kept / "deep", kept / "deep" / "older"):
        os.chown(path, uid, uid)
    declared = os.environ | {"PHOS_KEEP_FILES": f"relative:{life.home / pattern}"}
    life.start("import os\n" + WRITER, env=declared)
    life.counts_on()
    life.dump()
    life.counts_on(by=45)
    life.kill()
    made = {path.name for path in (kept / "deep").iterdir()}
    (kept / "deep" / "older").write_text("changed")
    later = (kept / "checkpoint").read_text()
    life.restore().settle()
    goes_on(life)
    (newer_one,) = newer(kept / "checkpoint")
    assert newer_one.read_text() == later
    saved = pattern == "kept"
    left = {path.name.partition(".phos-newer-")[0] for path in (kept / "deep").iterdir()}
    assert left >= made  # nothing that was made since is lost
    assert (kept / "deep" / "older").read_text() == ("as it was" if saved else "changed")
    assert len(newer(kept / "deep" / "older")) == saved


def test_what_a_program_declares_itself_also_after_its_restore(
    lives: Callable[[int], Life],
) -> None:
    life = lives(USER)
    kept = life.home / "kept"
    (kept / "deep").mkdir(parents=True)
    shutil.copy(program.__file__, life.home / "checkpoints.py")
    own(life, kept, kept / "deep")
    life.start("import os, checkpoints\ncheckpoints.keep_files('kept')\n" + WRITER)
    for _ in range(2):
        life.counts_on()
        shutil.rmtree(life.images, ignore_errors=True)
        life.dump()
        life.counts_on(by=5)
        life.kill()
        later = (kept / "checkpoint").read_text()
        life.restore().settle()
        goes_on(life)
        assert later in [each.read_text() for each in newer(kept / "checkpoint")]


def test_it_is_told_that_a_database_which_is_gone_is_another_file_now(life: Life) -> None:
    life.start(DATABASE)
    life.counts_on()
    life.dump()
    life.kill()
    (life.home / "data.sqlite").unlink()
    (said,) = [each for each in life.told() if "data.sqlite," in each]
    assert "to which SQLite will not write: the program must open it anew" in said


def own(life: Life, *paths: Path) -> None:
    for path in paths:
        os.chown(path, life.uid, life.uid, follow_symlinks=False)


@pytest.fixture(params=[0, USER])
def saver(request: pytest.FixtureRequest, lives: Callable[[int], Life]) -> tuple[Life, Path]:
    """A program that has declared a folder as its own, saved and killed. As the original would have
    gone on: a link is another, one folder is gone, and others are new.
    """
    life = lives(request.param)
    kept = life.home / "kept"
    (kept / "1").mkdir(parents=True, mode=0o750)
    (kept / "1" / "weights").write_text("one")
    (kept / "empty").mkdir(mode=0o710)
    (kept / "latest").symlink_to("1")
    own(life, kept, *kept.rglob("*"))
    life.start(COUNTER, env=os.environ | {"PHOS_KEEP_FILES": str(kept)})
    life.counts_on()
    life.dump()
    life.kill()
    shutil.rmtree(kept / "1")
    (kept / "empty").rmdir()
    (kept / "latest").unlink()
    (kept / "latest").symlink_to("2")
    (kept / "2").mkdir()
    (kept / "2" / "weights").write_text("two")
    (kept / "note").write_text("of another user")
    own(life, kept / "latest", kept / "2", kept / "2" / "weights")
    os.chown(kept / "note", USER + 1, USER + 1)
    return life, kept


def as_it_was_later(kept: Path) -> bool:
    return (
        {path.name for path in kept.iterdir()} == {"2", "latest", "note"}
        and (kept / "2" / "weights").read_text() == "two"
        and str((kept / "latest").readlink()) == "2"
    )


def test_a_declared_folder_is_as_it_was(saver: tuple[Life, Path]) -> None:
    """What was made since is put aside, but for what other users have made."""
    life, kept = saver
    restored = life.restore()
    restored.settle()
    life.counts_on()
    assert (kept / "1" / "weights").read_text() == "one"
    assert [(kept / name).stat().st_mode & 0o777 for name in ("1", "empty")] == [0o750, 0o710]
    assert str((kept / "latest").readlink()) == "1"
    aside = [path.name for name in ("2", "latest") for path in newer(kept / name)]
    assert {path.name for path in kept.iterdir()} == {"1", "empty", "latest", "note", *aside}
    assert (newer(kept / "2")[0] / "weights").read_text() == "two"
    assert str(newer(kept / "latest")[0].readlink()) == "2"


def test_what_another_program_writes_to_there_is_not_put_aside(saver: tuple[Life, Path]) -> None:
    life, kept = saver
    with (kept / "2" / "weights").open("ab"), pytest.raises(Busy, match="2/weights, which belongs"):
        life.restore()
    assert as_it_was_later(kept)
    life.restore().settle()
    life.counts_on()
    assert newer(kept / "2")


def test_what_lies_in_a_folder_of_another_user_is_let_be(lives: Callable[[int], Life]) -> None:
    """Its owner could put a link in the place of that folder."""
    life = lives(0)
    kept = life.home / "kept"
    theirs = kept / "theirs"
    theirs.mkdir(parents=True)
    (theirs / "latest").symlink_to("1")
    os.chown(theirs, USER, USER)
    life.start(COUNTER, env=os.environ | {"PHOS_KEEP_FILES": str(kept)})
    life.counts_on()
    life.dump()
    life.kill()
    (theirs / "new").write_text("of root")
    (theirs / "latest").unlink()
    (theirs / "latest").symlink_to("2")
    life.restore().settle()
    life.counts_on()
    assert str((theirs / "latest").readlink()) == "2"
    assert {path.name for path in theirs.iterdir()} == {"new", "latest"}


def test_it_is_let_be_if_files_are_to_be_kept(saver: tuple[Life, Path]) -> None:
    life, kept = saver
    life.restore(files=Policy.KEEP).settle()
    life.counts_on()
    assert as_it_was_later(kept)


def test_a_restore_that_fails_leaves_it_as_it_found_it(saver: tuple[Life, Path]) -> None:
    life, kept = saver
    working, life.criu = life.criu, broken_criu(life)
    with pytest.raises(Internal, match="criu restore failed"):
        life.restore()
    assert as_it_was_later(kept)
    life.criu = working
    life.restore().abandon()
    assert as_it_was_later(kept)


def test_a_worker_that_is_killed_leaves_it_as_it_found_it(
    saver: tuple[Life, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had put aside before is there again; folders that it has made may stay."""
    life, kept = saver
    with monkeypatch.context() as killed:
        killed.setenv("PHOS_FAULT", "files-replace:kill")
        with pytest.raises(Internal, match="working on the files of user"):
            life.restore()
    for folder in (kept / "1", kept / "empty"):
        folder.rmdir()
    assert as_it_was_later(kept)
    life.restore().settle()
    life.counts_on()
    assert (kept / "1" / "weights").read_text() == "one"


@pytest.mark.parametrize("user", [None, USER, USER + 1])
def test_what_the_administrator_keeps(user: int | None, lives: Callable[[int], Life]) -> None:
    """What belongs to all users, or to one."""
    life = lives(USER)
    (life.home / "closed").write_text("as it was")
    os.chown(life.home / "closed", USER, USER)
    life.start(COUNTER)
    life.counts_on()
    life.dump(kept=[(user, str(life.home / "clos*"))])
    life.kill()
    (life.home / "closed").write_text("changed")
    (life.home / "closure").touch()
    os.chown(life.home / "closure", USER, USER)
    life.restore().settle()
    life.counts_on()
    saved = user != USER + 1
    assert (life.home / "closure").exists()  # perhaps of another program of the user
    assert (life.home / "closed").read_text() == ("as it was" if saved else "changed")
    assert len(newer(life.home / "closed")) == saved


def test_more_is_declared_than_can_be_saved(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(901):
        (life.home / str(number)).touch()
    life.start(COUNTER, env=os.environ | {"PHOS_KEEP_FILES": str(life.home)})
    life.counts_on()
    with pytest.raises(Unsupported, match="more than 900 files"):
        life.dump()
    life.counts_on()


def test_nothing_of_others_is_saved(lives: Callable[[int], Life]) -> None:
    """Not by a link, and not what the owner can only see."""
    life = lives(USER)
    secret = life.private / "secret"
    secret.write_text("of root")
    (life.home / "link").symlink_to(secret)
    (life.home / "others").write_text("of root, too")
    life.start(COUNTER, env=os.environ | {"PHOS_KEEP_FILES": f"{life.home}:{life.private}"})
    life.counts_on()
    life.dump()
    assert life.record is not None and life.record.details is not None
    assert not [file for file in life.record.details.written_files if file.path != str(life.log)]


CHANGES_ITS_DESCRIPTORS = """
import os, socket, time
again, one, two = (os.open(name, os.O_RDWR) for name in ("one", "one", "two"))
others = {
    "one": lambda: os.dup(again),
    "two": lambda: os.dup(two),
    "secret": lambda: os.open("secret", os.O_PATH),
    "pipe": lambda: os.open("pipe", os.O_RDWR),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
}
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.005)
    for name, open_it in others.items():
        if os.path.exists(f"to {name}"):
            opened = open_it()
            os.dup2(opened, one)
            os.close(opened)
            os.unlink(f"to {name}")
"""
"""Gives the descriptor of one file to something else when it is told to."""


@pytest.mark.parametrize("other", ["two", "secret", "pipe", "socket"])
def test_a_descriptor_is_another_file_when_it_is_opened(
    other: str, lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file's own bytes are saved under its path, and nothing that its owner cannot read."""
    life = lives(USER)
    for name in ("one", "two", "secret"):
        (life.home / name).write_text(f"what is in {name}")
    os.mkfifo(life.home / "pipe")
    for name in ("one", "two", "pipe"):
        os.chown(life.home / name, USER, USER)
    (life.home / "secret").chmod(0o600)
    life.start(CHANGES_ITS_DESCRIPTORS)
    life.counts_on()

    def tell(name: str) -> None:
        (life.home / f"to {name}").touch()
        wait_for(lambda: not (life.home / f"to {name}").exists())

    with monkeypatch.context() as meanwhile:
        look, copy = written_files.chosen, written_files.WrittenFiles.__enter__

        def chosen(*of: Any) -> written_files.Chosen:
            found = look(*of)
            tell(other)
            return found

        def copied(files: written_files.WrittenFiles) -> written_files.WrittenFiles:
            meanwhile.setattr(written_files, "chosen", chosen)
            copy(files)
            meanwhile.setattr(written_files, "chosen", look)
            tell("one")
            return files

        meanwhile.setattr(written_files.WrittenFiles, "__enter__", copied)
        life.dump()
    life.counts_on()
    assert life.record is not None and life.record.details is not None
    saved = {
        Path(each.path).name: (life.images / each.saved).read_text()
        for each in life.record.details.written_files
        if each.path != str(life.log)
    }
    assert saved == {name: f"what is in {name}" for name in ("one", "two")}


POINTS = ["files-beside", "files-fill", "files-filled", "files-replace"]


@pytest.mark.parametrize("restarted", [False, True], ids=["the worker", "phosd, too"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("uid", [0, USER])
def test_a_kill_while_it_is_put_back(
    uid: int,
    point: str,
    restarted: bool,
    lives: Callable[[int], Life],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each file is whole, old or new, as soon as phosd knows of it, and nothing is left."""
    life = lives(uid)
    state = state_of(life)
    dumped(life, STATE)
    if point == "files-replace":  # it is another file
        state.rename(state.with_name("other"))
        shutil.copy(state.with_name("other"), state)
        os.chown(state, uid, uid)
    with state.open("ab") as file:
        file.write(b"and more")
    newer_bytes = state.read_bytes()
    with monkeypatch.context() as killed:
        killed.setenv("PHOS_FAULT", f"{point}:kill")
        if restarted:  # it is another phosd that sees to it
            killed.setattr(tree_files, "mend", lambda *_: None)
        with pytest.raises(Internal, match="working on the files of user"):
            life.restore()
    half = state.read_bytes() not in (newer_bytes, saved_bytes(life))
    assert half == (restarted and point == "files-fill")
    tree_files.mend(life.saved_tree)
    assert state.read_bytes() in (newer_bytes, saved_bytes(life))
    assert restarted or state.read_bytes() == newer_bytes
    left = {path for path in state.parent.iterdir() if ".phos-" in path.name}
    assert not left
    life.restore().settle()
    goes_on(life)
    assert newer_bytes in [path.read_bytes() for path in newer(state)]


def saved_bytes(life: Life) -> bytes:
    """What the image has of its one written file."""
    assert life.record is not None and life.record.details is not None
    (file,) = life.record.details.written_files
    return (life.images / file.saved).read_bytes()


def test_a_disk_without_room(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    state_of(life)
    life.start(STATE)
    life.counts_on()
    monkeypatch.setattr(written_files, "copy_file", full)
    with pytest.raises(OutOfSpace, match="state into the image failed"):
        life.dump()
    goes_on(life)
    assert not [*life.private.glob("written-*")]


def test_a_clone_gets_them_from_the_image(beside: Life) -> None:
    """Not what the original has made of them since, which goes on with its own."""
    state = state_of(beside)
    beside.start(STATE)
    beside.counts_on()
    beside.dump()
    saved = len(beside.values())
    beside.counts_on(by=20)
    cloned = beside.restore(clone=Clone(beside.saved_tree, "one", CloneFiles.COPY))
    cloned.settle()
    log = Path(f"{beside.log}.clone-one")
    assert in_order(beside.counts_on(log, by=20)) and beside.values(log)[0] <= saved
    assert Path(f"{state}.clone-one").exists() and newer(state) == []
    assert in_order(beside.counts_on())


def test_it_is_written_all_the_time(life: Life) -> None:
    """Another process of the tree writes without a pause while it is saved."""
    writer = (
        "import os\nfile = os.open('both', os.O_RDWR | os.O_CREAT)\n"
        "number = 0\n"
        "while os.getppid() != 1:\n"
        "    number += 1\n"
        "    os.pwrite(file, b'%020d' % number, 0)\n"
        "    os.pwrite(file, b'%020d' % number, 1 << 20)\n"
    )
    life.start(
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {writer!r}])\n"
        + COUNTER
    )
    life.counts_on()
    life.dump()
    life.kill()
    assert life.record is not None and life.record.details is not None
    (found,) = [each for each in life.record.details.written_files if each.path.endswith("both")]
    data = (life.images / found.saved).read_bytes()
    first, second = int(data[:20]), int(data[1 << 20 : (1 << 20) + 20])
    assert 0 <= first - second <= 1, "of two moments"
    life.restore().settle()
    assert in_order(life.counts_on())
