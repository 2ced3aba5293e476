"""Memory that goes into a store while the program stands still, and into the image afterwards."""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phosd.engine.criu.dump.dump import Dump, DumpOptions
from phosd.engine.criu.run.page_store import PageStore
from phosd.engine.program import tree
from phosd.errors import Internal
from tests.node.criu.life import USER, Life, in_order

PROGRAM = """
import hashlib, os, random, time
child = os.fork() == 0
memory = random.Random(os.getpid()).randbytes(24 << 20)
right = hashlib.sha256(memory).digest()
value = 0
while True:
    if hashlib.sha256(memory).digest() != right:
        os._exit(1)
    value += 1
    if not child:
        print(value, flush=True)
    elif os.getppid() == 1:
        os._exit(0)
    time.sleep(0.01)
"""
"""Two processes that end when their memory is not what it was."""


def dump(life: Life, store: PageStore) -> None:
    life.images.mkdir()
    with Dump(life.criu, tree.scan(life.pid), life.images, DumpOptions(), store) as prepared:
        life.counts_on()  # it runs while CRIU waits
        life.dumped = prepared.finish()


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("room", [128 << 20, 20 << 20])
def test_a_restored_program_has_its_memory(life: Life, uid: int, room: int) -> None:
    """Also when the store is too small for all of it."""
    life.uid = uid
    os.chown(life.home, uid, uid)
    life.start(PROGRAM)
    life.counts_on()
    with PageStore(life.private, room) as store:
        dump(life, store)
        assert life.dumped is not None
        saved = sum(path.stat().st_blocks * 512 for path in life.images.glob("pages-*.img"))
        store.complete(life.images, life.images)
    whole = sum(path.stat().st_blocks * 512 for path in life.images.glob("pages-*.img"))
    assert whole - saved > min(room, 48 << 20) * 3 // 4, "the store took little of the memory"
    life.record = life.dumped.record("images")
    life.counts_on()
    life.kill()
    life.restore()
    assert in_order(life.counts_on())
    assert len(tree.scan(life.pid).pids) == 2, "a process found its memory changed"


def test_a_ledger_that_points_elsewhere_is_refused(life: Life) -> None:
    """CRIU runs as the program's owner, who may reach it."""
    life.start(PROGRAM)
    life.counts_on()
    with PageStore(life.private, 128 << 20) as store:
        dump(life, store)
        os.pwrite(store.descriptor, (1 << 60).to_bytes(8, "little"), 48 + 3 * 8)
        with pytest.raises(Internal, match="damaged"):
            store.complete(life.images, life.images)


def test_no_room_is_no_error(life: Life) -> None:
    assert PageStore.if_there_is_room(Path("/dev/shm"), 1 << 50) is None


def test_there_is_room_for_descriptors(tmp_path: Path) -> None:
    """A process with threads waits for all processors each time that it needs more."""
    raised = "from phosd.engine.system.rlimit import allow_many_descriptors as a; a()"
    told = "; print(open('/proc/self/status').read())"
    with PageStore(tmp_path, 1 << 20) as store:
        criu = subprocess.run(
            ["cat", "/proc/self/status"],
            env=store.environment,
            pass_fds=store.descriptors,
            text=True,
            capture_output=True,
            check=True,
        ).stdout
    ours = subprocess.check_output([sys.executable, "-c", raised + told], text=True)
    room = min(16384, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for status in (criu, ours):
        assert int(re.findall(r"^FDSize:\s*(\d+)", status, re.MULTILINE)[0]) >= room


def test_nobody_waits_for_the_copies_of_one_that_was_killed(life: Life) -> None:
    """CRIU's threads copy: without them the program would stand still until a deadline."""
    with PageStore(life.private, 1 << 20) as store:
        os.pwrite(store.descriptor, (1).to_bytes(8, "little"), 24)  # submitted, and not completed
        began = time.monotonic()
        with pytest.raises(Internal, match="ended before it had copied"):
            store.wait(lambda: False)
        assert time.monotonic() - began < 5
        os.pwrite(store.descriptor, (1).to_bytes(8, "little"), 32)
        store.wait(lambda: False)
