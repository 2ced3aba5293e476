"""The mover keeps parked programs: nothing that happens meanwhile ends its main loop."""

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest

from phosd.engine.mover.protocol.connection import Connection, PeerGone
from phosd.engine.mover.worker import gpu as gpu_module
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.gpu_block import GpuBlock
from phosd.engine.mover.worker.guarded import GuardedMemory
from phosd.engine.mover.worker.main import MoverDaemon
from phosd.engine.system.procfs import ProcessId, process_id
from phosd.errors import Internal

_ROWS = 500
_SECONDS = 0.5


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("")  # a name of the kernel's choice
        made.listen()
        yield made


def gpu_without_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, list[Any]]:
    """A GPU whose driver only notes what is released, slowly."""
    released: list[Any] = []

    def call(name: str, *arguments: Any, **_: Any) -> Any:
        time.sleep(0.01)
        if name == "cuMemRelease":
            released.append(arguments[0])

    monkeypatch.setattr(gpu_module, "call", call)
    gpu = Gpu.__new__(Gpu)
    gpu.blocks = {}
    gpu._users = Counter()
    gpu._using = threading.Lock()
    gpu._neighbours = {}
    gpu._reserved = {}
    gpu._reserving = threading.Lock()
    return gpu, released


def test_the_main_loop_goes_on_after_any_error(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = MoverDaemon(0, 0, 30.0)
    errors = [Internal("the driver is gone"), RuntimeError("dictionary changed"), KeyError(7)]

    def look() -> None:
        os.eventfd_write(daemon._wake, 1)  # at once again
        if errors:
            raise errors.pop()
        daemon._end(3)

    monkeypatch.setattr(daemon, "_look", look)
    assert daemon.run(listener) == 3
    assert "Traceback" in caplog.text and "dictionary changed" in caplog.text


def test_a_client_for_whom_there_is_no_thread_is_sent_away(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    daemon = MoverDaemon(0, 0, 30.0)
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(listener.getsockname())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            daemon._admit(listener)
        with pytest.raises(PeerGone):
            Connection(end).receive(10)


@pytest.mark.usefixtures("often")
def test_who_is_dead_is_looked_for_while_others_are_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, _ = gpu_without_device(monkeypatch)
    parked = GuardedMemory(gpu)
    me = process_id(os.getpid())
    assert me is not None
    gpu.blocks = {key: cast(GpuBlock, None) for key in range(100 * _ROWS)}
    over = threading.Event()

    def guard() -> None:
        for at in range(100):
            rows = range(at * _ROWS, (at + 1) * _ROWS)
            parked.guard([(*me, key, key) for key in rows])
            if over.is_set():
                return

    thread = threading.Thread(target=guard)
    thread.start()
    try:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            parked.forget_the_dead()
            assert gpu.reserved == set()
    finally:
        over.set()
        thread.join()
    assert not parked.empty


def test_a_reserve_is_released_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process comes back while the main loop finds that it has ended."""
    gpu, released = gpu_without_device(monkeypatch)
    gpu._reserved = {frozenset({ProcessId(7, number)}): number for number in range(5)}
    failed: list[Exception] = []

    def let_go() -> None:
        try:
            gpu.reserve(0, [ProcessId(7, number) for number in range(5)])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=let_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(released) == [0, 1, 2, 3, 4] and not gpu._reserved
