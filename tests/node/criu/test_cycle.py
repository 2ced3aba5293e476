"""Dump, kill -9, restore: the program goes on where it was saved."""

import contextlib
import fcntl
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phosd.engine.criu.dump import dump as criu_dump
from phosd.engine.criu.dump.dump import Dump, DumpOptions
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore import restore as restore_module
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restore import EndedItself, Restored
from phosd.engine.hook_client.places import hooks_folder
from phosd.engine.job.progress import Progress
from phosd.engine.program import tree
from phosd.engine.recovery import dumps
from phosd.engine.system import procfs
from phosd.errors import Cancelled, Internal, NoSuchProcess, Timeout
from tests.node.criu.life import COUNTER, USER, Life, in_order, wait_for

FAMILY = """
import mmap, os, socket, threading, time
reader, writer = os.pipe()
near, far = socket.socketpair()
anonymous = mmap.mmap(-1, mmap.PAGESIZE)
name = "/dev/shm/phos-test-%d" % os.getpid()
with open(name, "x+b") as file:
    file.truncate(16 << 20)
    unlinked = mmap.mmap(file.fileno(), 16 << 20)
    os.unlink(name)
for _ in range(3):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if os.fork() == 0:
    while True:  # the worker adds one, by every way that processes talk
        value = int.from_bytes(far.recv(8), "little") + int.from_bytes(anonymous[:8], "little")
        unlinked[:8] = value.to_bytes(8, "little")
        os.write(writer, b"done")
value = 0
while True:
    anonymous[:8] = (1).to_bytes(8, "little")
    near.send(value.to_bytes(8, "little"))
    os.read(reader, 4)
    value = int.from_bytes(unlinked[:8], "little")
    print(value, flush=True)
    time.sleep(0.005)
"""


@pytest.mark.parametrize("uid", [0, USER])
def test_a_program_goes_on_with_its_ids(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    pid = life.start(COUNTER)
    before = procfs.status(pid)
    life.counts_on()
    life.dump()
    life.counts_on()
    life.kill()
    saved = life.values()

    restored = life.restore()
    values = life.counts_on()

    assert restored.pid == pid
    assert values[len(saved)] <= saved[-1], "it went back to the checkpoint"
    assert in_order(values)
    after = procfs.status(pid)
    assert (after.uids, after.gids, after.groups) == (before.uids, before.gids, before.groups)
    assert after.capabilities == before.capabilities
    assert bounding_set(pid) == bounding_set(os.getpid())
    found = procfs.stat(pid)
    assert found is not None
    assert found.parent != os.getpid(), "it must not end with us"


def bounding_set(pid: int) -> str:
    lines = (procfs.PROC / str(pid) / "status").read_text().splitlines()
    return next(line for line in lines if line.startswith("CapBnd"))


@pytest.mark.parametrize("uid", [0, USER])
def test_a_whole_tree_goes_on(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    life.start(FAMILY)
    life.counts_on()
    dump = life.dump()
    assert len(dump.tree.processes) == 2
    assert len(dump.tree.root.threads) == 4
    life.counts_on()
    life.kill()
    life.restore()
    assert in_order(life.counts_on())
    assert tree.scan(life.pid).pids == dump.tree.pids


def test_a_restored_program_can_be_saved_again(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    life.again()
    life.counts_on()
    life.images.rename(life.private / "first")
    life.again()
    assert in_order(life.counts_on())


ON_THEIR_CPUS = """
import os, threading
def keeps(cpu):
    os.sched_setaffinity(0, {cpu})
    while os.sched_getaffinity(0) == {cpu}:
        pass
    os.write(2, b"lost\\n")
    os._exit(3)
cpus = sorted(os.sched_getaffinity(0))
for number in range(4):
    threading.Thread(target=keeps, args=(cpus[-1 - number % 2],), daemon=True).start()
"""


@pytest.mark.parametrize(("uid", "nested"), [(0, False), (USER, True)])
def test_threads_are_never_on_other_cpus_than_they_were_given(
    lives: Callable[[int], Life], tmp_path: Path, uid: int, *, nested: bool
) -> None:
    """They look all the time, and so from the first moment after the restore on."""
    life = lives(uid)
    errors = life.home / "errors"
    with errors.open("ab") as stderr:
        os.fchown(stderr.fileno(), uid, uid)
        life.start(ON_THEIR_CPUS + COUNTER, stderr=stderr)

    def affinities(pid: int) -> list[list[int]]:
        return sorted(sorted(os.sched_getaffinity(each)) for each in procfs.threads(pid))

    wait_for(lambda: [len(each) for each in affinities(life.pid)].count(1) >= 4)
    life.counts_on()
    given = affinities(life.pid)
    if nested:
        life.criu = replace(life.criu, runtime_dir=tmp_path)
        hooks_folder(tmp_path).mkdir()
    life.dump()
    life.kill()
    for _ in range(2):
        restored = life.restore(pid_namespace=nested)
        assert in_order(life.counts_on())
        assert (affinities(restored.pid), errors.read_bytes()) == (given, b"")
        restored.abandon()


@pytest.mark.parametrize("uid", [0, USER])
def test_a_root_tied_to_its_parent_outlives_the_restore(
    lives: Callable[[int], Life], uid: int
) -> None:
    life = lives(uid)
    tie = "import ctypes, signal\nctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    life.start(tie + COUNTER)
    life.counts_on()
    dump = life.dump()
    assert dump.details.tied_to_parent == signal.SIGTERM
    life.kill()
    life.restore()
    assert in_order(life.counts_on())
    stat = procfs.stat(life.pid)
    assert stat is not None
    keeper = procfs.status(stat.parent)
    assert keeper.uids[0] == uid
    assert uid == 0 or keeper.capabilities == 0, "its new parent has no more rights than it"
    os.kill(stat.parent, signal.SIGKILL)
    wait_for(lambda: (now := procfs.stat(life.pid)) is None or now.dead)


ENDING = """
import os, signal, sys
def end(number, frame):
    os._exit(3)
signal.signal(signal.SIGUSR1, end)
"""


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGUSR1, "exit 3\n"), (signal.SIGKILL, "signal 9\n")]
)
def test_how_a_restored_program_ends_is_told(
    lives: Callable[[int], Life], uid: int, number: signal.Signals, told: str
) -> None:
    life = lives(uid)
    life.start(ENDING + COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    end = life.log.with_name("end")
    life.restore(end=end)
    assert in_order(life.counts_on())
    assert end.read_text() == ""
    assert end.stat().st_uid == uid
    os.kill(life.pid, number)
    wait_for(lambda: end.read_text() == told)
    wait_for(lambda: procfs.stat(life.pid) is None)


def test_killing_criu_at_any_instant_leaves_the_program_alone(life: Life) -> None:
    life.start(FAMILY)
    life.counts_on()
    chance = random.Random(7)
    cancelled = 0
    for number in range(12):
        progress = Progress()
        threading.Timer(chance.uniform(0.0, 0.1), progress.cancel).start()
        try:
            life.dump(progress)
        except Cancelled:
            cancelled += 1
        left = [*life.private.glob("criu-*"), *life.private.glob("criu-*/*")]
        assert not left, "nothing is left behind"
        life.images.rename(life.private / f"images{number}")
        life.counts_on(by=3)
    assert cancelled > 0
    assert in_order(life.values())


def test_a_dump_that_takes_too_long_is_given_up(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    with pytest.raises(Timeout, match="criu dump did not finish"):
        life.dump(deadline=0.0)
    assert in_order(life.counts_on())


@pytest.mark.parametrize("deadline", [0.0, 0.03, 0.06, 0.1])
def test_criu_has_let_go_when_a_dump_took_too_long(life: Life, deadline: float) -> None:
    """Whoever hears of it goes on with the program, which CRIU must not hold any more."""
    life.start(FAMILY)
    life.counts_on()
    life.images.mkdir()
    found = tree.scan(life.pid)
    with Dump(life.criu, found, life.images, DumpOptions(deadline=deadline)) as dump:
        try:
            dump.finish()
        except Timeout:
            assert not any(procfs.status(t).tracer for p in found for t in p.threads)
            assert life.pid not in dumps.roots_of_dumps()
        else:
            assert deadline, "no dump is that quick"
            dump.settle()
    assert in_order(life.counts_on())


def test_the_time_before_the_stop_does_not_count(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU waits meanwhile, for as long as the copying of device memory takes."""
    life.start(COUNTER)
    life.counts_on()
    life.images.mkdir()
    with Dump(life.criu, tree.scan(life.pid), life.images, DumpOptions()) as dump:
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
        dump.finish()
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 7200)
        dump.settle()
    assert in_order(life.counts_on())


def test_a_program_that_dies_meanwhile_is_an_error_not_a_hang(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    found = tree.scan(life.pid)
    os.kill(life.pid, signal.SIGKILL)
    life.images.mkdir()
    with pytest.raises((Internal, NoSuchProcess)):
        criu_dump.dump_tree(life.criu, found, life.images, DumpOptions())


def test_a_tree_that_ends_after_the_restore_is_noticed(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_module, "SETTLED", 3.0)  # ending takes a busy machine some time
    life.start(
        "import os, time\nopen('there', 'w').close()\n"
        "while not os.path.exists('go'):\n    time.sleep(0.01)\n"
    )
    wait_for((life.home / "there").exists)
    life.dump()
    life.kill()
    (life.home / "go").touch()
    with pytest.raises(Internal, match="ended at once"):
        life.restore().require_settled()


LAST_MOMENTS = """
import os, signal, time
state = open("state", "r+")
open("there", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
state.write("its last")
state.flush()
"""


@pytest.mark.parametrize("by_itself", [True, False])
def test_what_a_program_wrote_that_ends_at_once(
    life: Life, monkeypatch: pytest.MonkeyPatch, by_itself: bool
) -> None:
    """It stays if the program has ended by itself; one that a signal has ended is not restored."""
    monkeypatch.setattr(restore_module, "SETTLED", 3.0)
    state = life.home / "state"
    state.write_text("at first")
    os.chown(state, life.uid, life.uid)
    life.start(LAST_MOMENTS + ("os._exit(3)" if by_itself else "os.kill(os.getpid(), 9)"))
    wait_for((life.home / "there").exists)
    life.dump()
    life.kill()
    state.write_text("newer since")
    (life.home / "go").touch()
    restored: list[Restored] = []
    with pytest.raises(Internal, match="ended at once") as raised:
        restored.append(life.restore(end=life.home / "end"))
        restored[0].require_settled()
    for each in restored:
        each.abandon()
    assert isinstance(raised.value, EndedItself) == by_itself
    assert "exit code 3" in str(raised.value) or not by_itself
    assert state.read_text() == ("its last" if by_itself else "newer since")
    told = "exit 3" if by_itself else "signal 9"
    assert (life.home / "end").read_text().strip() == told


def test_file_locks_come_back(life: Life) -> None:
    hold = "import fcntl\nlock = open('lock', 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)\n"
    life.start(hold + COUNTER)
    life.counts_on()
    life.again()
    with (life.home / "lock").open("a") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("piped", [False, True])
def test_a_cancelled_restore_leaves_nothing_behind(life: Life, piped: bool) -> None:
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer) if piped else life.start(COUNTER)
    os.close(writer)
    time.sleep(0.2)
    life.dump()
    os.close(reader)
    life.kill()
    for delay in (0.01 * number for number in range(12)):  # from its start until it is done
        progress = Progress()
        threading.Timer(delay, progress.cancel).start()
        with contextlib.suppress(Cancelled):
            criu_restore.restore_tree(
                life.criu, life.saved_tree, TreeRestoreOptions(), progress
            ).abandon()
        time.sleep(0.1)
        assert (now := procfs.stat(life.pid)) is None or now.dead, "it does not come up later"
    life.log.touch()
    life.restore(output=life.log)
    life.counts_on()
