"""A program has semaphores, whose files were opened under a name that is gone, and named later."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.dump import shm_relink
from tests.node.criu.life import USER, Life, in_order

SEMAPHORES = """
import multiprocessing, os, time
from _multiprocessing import SemLock
spawning = multiprocessing.get_context("spawn")
taken, free = spawning.Semaphore(3), spawning.Lock()
taken.acquire()
child = os.fork() == 0
if child:
    while os.getppid() != 1:  # it hands back what the parent takes
        time.sleep(0.001)
        if not taken.get_value():
            taken.release()
    os._exit(0)
lock = taken._semlock
with open("names", "w") as names:
    print(lock.name, free._semlock.name, file=names)
value = 0
while True:
    taken.acquire()  # it waits for the child: they share the file
    # ... and so does who opens it by name, as a worker that is started later does.
    assert SemLock._rebuild(lock.handle, lock.kind, lock.maxvalue, lock.name)._get_value() <= 3
    free.acquire()
    free.release()
    value += 1
    print(value, flush=True)
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def one_dump_at_a_time() -> Iterator[None]:
    """CRIU's links in the folder that all programs share have names that other dumps use, too."""
    with Path("/dev/shm/phos-test-links").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin(life: Life) -> list[Path]:
    """Start it; returns the files of its semaphores."""
    os.chown(life.home, life.uid, life.uid)
    life.start(SEMAPHORES)
    life.counts_on()
    return [Path(f"/dev/shm/sem.{name[1:]}") for name in (life.home / "names").read_text().split()]


def links() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("link_remap.*")]


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("lost", [True, False], ids=["gone", "there"])
def test_they_are_restored_again_and_again(
    lives: Callable[[int], Life], uid: int, lost: bool
) -> None:
    """Also when the program's end has removed their files, as the resource tracker does."""
    life = lives(uid)
    files = begin(life)
    for goes_on in (True, False, True):
        life.dump(leave_running=goes_on)
        assert not links()
        life.kill()
        if lost:
            for path in files:
                path.unlink(missing_ok=True)
        life.restore().settle()
        assert in_order(life.counts_on())
        assert {(path.stat().st_uid, path.stat().st_nlink) for path in files} == {(uid, 1)}
        shutil.rmtree(life.images)
    for path in files:
        path.unlink(missing_ok=True)


def test_the_links_of_a_dump_that_was_killed_are_removed(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next dump could not make its own. Somebody else's file is left alone."""
    files = begin(life)
    stranger = Path("/dev/shm/link_remap.0")
    stranger.touch()
    looked_for: list[Path] = []
    with monkeypatch.context() as patched:
        patched.setattr(shm_relink, "_is_left", looked_for.append)
        life.dump()
    assert len(looked_for) == len(files)
    for path, link in zip(files, looked_for, strict=True):
        os.link(path, link)
    shutil.rmtree(life.images)
    life.dump()
    assert links() == [stranger.name]
    for path in (stranger, *files):
        path.unlink(missing_ok=True)
