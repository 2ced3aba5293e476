"""CRIU's files of a user's program, with one to three fields changed at random, are restored.

What comes of it may fail in any way. It never has more rights than its user, nor another's file,
and it never takes longer than its deadline.
"""

import contextlib
import os
import random
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from phosd.engine.criu.images import pagemap
from phosd.engine.criu.images.digests import digests
from phosd.engine.criu.images.rights import Rights
from phosd.engine.criu.restore import parallel_pages
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.program import tree
from phosd.engine.system import procfs
from phosd.errors import PhosError
from tests.node.criu.life import COUNTER, Life, wait_for
from tests.support.criu_images import ImageFile, mutate
from tests.support.rotation import seeds, times

FUZZED = 100_000 + 2 * os.getpid()
"""The user of this run's programs alone: all that is theirs is from the restore."""
OTHER = FUZZED + 1
MUTATIONS = 25
"""Restores of one saved program."""
ROUNDS = seeds("image fuzz", 1, whole=times(1, everything=15, soak=40))
DEADLINE = 5.0
MOST = DEADLINE + 25
"""Seconds: a restore is given up at its deadline, and then ended."""

PROGRAM = (
    """
import ctypes, mmap, os, signal, socket, sys, threading, time
kept = open("data", "r+b")
appended = open("appended", "ab")
shared = mmap.mmap(kept.fileno(), 4096, mmap.MAP_PRIVATE)
pipe = os.pipe()
pair = socket.socketpair()
listening = socket.socket(socket.AF_UNIX)
listening.bind("socket")
listening.listen()
folder = os.open(".", os.O_RDONLY)
event = os.eventfd(3)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 3600)
os.nice(1)
threading.Thread(target=time.sleep, args=(999,), daemon=True).start()
if os.fork() == 0:
    time.sleep(999)
"""
    + COUNTER
)


def no_image_of_pages(path: Path) -> bool:
    return path.suffix == ".img" and not path.name.startswith("pages-")


@pytest.fixture
def life(lives: Callable[[int], Life]) -> Iterator[Life]:
    """A program with many kinds of things, saved and killed."""
    made = lives(FUZZED)
    for name in ("data", "appended"):
        (made.home / name).write_bytes(bytes(4096))
        os.chown(made.home / name, FUZZED, FUZZED)
    made.start(PROGRAM)
    made.counts_on()
    made.dump()
    made.kill()
    yield made
    end_all()


def theirs() -> list[int]:
    """All processes of the two users."""
    found = []
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if {*procfs.status(pid).uids} & {FUZZED, OTHER} and not procfs.ending(pid):
                found.append(pid)
    return found


def end_all() -> None:
    """End whatever has come up."""

    def none_left() -> bool:
        for pid in theirs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not theirs()

    wait_for(none_left)


@pytest.fixture
def of_others(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of another user and of root that the program's user may not open."""
    folder = tmp_path_factory.mktemp("others")
    folder.chmod(0o755)
    made = [folder / "of_another", folder / "of_root"]
    for path, uid in zip(made, (OTHER, 0), strict=True):
        path.write_bytes(b"secret" * 700)
        path.chmod(0o600)
        os.chown(path, uid, uid)
    return made


def require_no_more(life: Life) -> None:
    """Whatever runs has its user's rights alone, and only files that this user may open."""
    for pid in theirs():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            Rights.known_to_kernel(tree.scan(pid).ids).require_plain(Owner(FUZZED, FUZZED, ()))
            for each in procfs.descriptors(pid):
                if stat.S_ISREG(each.file.st_mode) or stat.S_ISDIR(each.file.st_mode):
                    may_open(each.file, each.target)
            for place in ("cwd", "root"):
                found = (procfs.PROC / str(pid) / place).stat()
                may_open(found, place, os.X_OK)


def may_open(file: os.stat_result, name: str, wanted: int = os.R_OK) -> None:
    """Require that the file's mode lets the user do this."""
    shift = 6 if file.st_uid == FUZZED else 3 if file.st_gid == FUZZED else 0
    assert file.st_mode >> shift & wanted, f"{name} cannot be opened by its user"


@pytest.mark.parametrize("number", ROUNDS)
def test_changed_images(
    number: int, life: Life, of_others: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(number)
    whole = life.private / "whole"
    shutil.copytree(life.images, whole)
    before = [path.read_bytes() for path in of_others]
    kinds: dict[str, list[str]] = {}
    for path in sorted(filter(no_image_of_pages, whole.iterdir())):
        kinds.setdefault(path.name.partition("-")[0], []).append(path.name)
    texts = [*map(str, of_others), "/etc/shadow", "/proc/1/root", "/proc/1/cwd", "/dev/mem"]
    texts += [
        f"{life.home}/data",
        "../" * 8 + "etc/shadow",
        "",
        "x" * 5000,
        "/",
        f"/proc/{os.getpid()}/fd/0",
    ]
    for _ in range(MUTATIONS):
        shutil.rmtree(life.images)
        shutil.copytree(whole, life.images)
        done = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            name = chance.choice(kinds[chance.choice([*kinds])])
            image = ImageFile.read(life.images / name)
            if image.leaves:
                done.append(f"{name}: {mutate(image, chance, texts)}")
                image.write(life.images / name)
        assert life.record is not None
        life.record = msgspec.structs.replace(life.record, files=digests(life.images))
        # Every other time threads put back what of its little memory they can.
        spares = chance.random() < 0.5
        monkeypatch.setattr(parallel_pages, "_LEAST", 1 if spares else 1 << 60)
        monkeypatch.setattr(parallel_pages, "_MOST_KEPT", 0)
        monkeypatch.setattr(pagemap, "LEAST_RUN", 1)
        began = time.monotonic()
        with contextlib.suppress(PhosError):
            criu_restore.restore_tree(
                life.criu, life.saved_tree, TreeRestoreOptions(deadline=DEADLINE)
            ).settle()
        took = time.monotonic() - began
        print(f"{took:.2f} s, {spares=}, {len(theirs())} processes; {'; '.join(done)[:300]}")
        require_no_more(life)
        assert took < MOST
        end_all()
        assert [path.read_bytes() for path in of_others] == before


def test_files_are_written_as_they_were_read(life: Life) -> None:
    """Else every mutation would fail for the same reason."""
    for path in filter(no_image_of_pages, life.images.iterdir()):
        image = ImageFile.read(path)
        image.write(life.private / "again")
        assert (life.private / "again").read_bytes() == path.read_bytes(), path.name
        assert image.leaves or not image.rest, path.name
