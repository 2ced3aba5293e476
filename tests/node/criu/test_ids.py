"""Every pid and thread id of the tree must be free, and who holds one is named."""

import os
import signal
import threading
import time

import pytest

from phosd.engine.criu.restore.admission import require_free
from phosd.engine.system import procfs
from phosd.errors import Busy
from tests.node.criu.life import COUNTER, Life, in_order, records, wait_for
from tests.support.pids import occupy, release


def test_the_living_original_is_in_the_way(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    with pytest.raises(Busy, match=rf"needs id {life.pid}, which pid {life.pid} \(/usr/bin/pyth"):
        life.restore()
    assert in_order(life.counts_on())


def test_a_stranger_on_the_pid(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    stranger = occupy(life.pid)
    try:
        with pytest.raises(Busy, match=rf"needs id {stranger}, which pid {stranger} \("):
            life.restore()
    finally:
        release(stranger)
    life.restore()
    assert in_order(life.counts_on())


def test_a_stranger_on_a_thread_id(life: Life) -> None:
    thread = "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    life.start("import threading, time\n" + thread + COUNTER)
    life.counts_on()
    dump = life.dump()
    (number,) = set(dump.tree.root.threads) - {life.pid}
    life.kill()
    stranger = occupy(number)
    try:
        with pytest.raises(Busy, match=rf"needs id {number}, which"):
            life.restore()
    finally:
        release(stranger)


def test_a_straggler_in_the_session_is_in_the_way(life: Life) -> None:
    """Its session keeps the number taken, though no process has it as a pid."""
    life.start("import os, time\nif os.fork() == 0:\n    time.sleep(99)\n" + COUNTER)
    life.counts_on()
    dump = life.dump()
    child = dump.tree.pids[1]
    os.kill(life.pid, signal.SIGKILL)
    assert life.started is not None
    life.started.wait()
    alone = [p for p in records(dump.tree) if p.pid == life.pid]
    try:
        with pytest.raises(Busy, match=rf"pid {child} .* is still in the session"):
            require_free(alone)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_zombie_is_waited_for(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    dump = life.dump()
    os.kill(life.pid, signal.SIGKILL)
    wait_for(lambda: (found := procfs.stat(life.pid)) is not None and found.dead)
    assert life.started is not None
    begin = time.monotonic()
    threading.Timer(0.3, life.started.wait).start()
    require_free(records(dump.tree))
    assert time.monotonic() - begin > 0.2
