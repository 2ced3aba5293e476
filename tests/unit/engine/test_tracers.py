"""What phosd and CRIU's plugin say to each other, with a plugin that says anything."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from phosd.engine.criu.run import tracers as module
from phosd.engine.criu.run.tracers import Tracer, checkpoint_turn, restore_turn
from phosd.errors import Cancelled, Timeout

LATER = 60.0
THREADS = {7: 70, 8: 80, 9: 90}


class Plugin:
    """The other end of a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        number = int(tracer.environment["PHOS_DRIVER_PEER"])
        assert tracer.descriptors == [number]
        self._socket = socket.socket(fileno=socket.dup(number))
        self._socket.settimeout(LATER)
        tracer.started()

    def says(self, *texts: str) -> None:
        for text in texts:
            self._socket.send(text.encode())

    def hears(self) -> str:
        """What phosd says next; empty if it says nothing any more."""
        return self._socket.recv(1 << 16).decode()

    def end(self) -> None:
        self._socket.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Tracer], list[Plugin]]]:
    monkeypatch.setattr(module, "own_id", int)
    with Tracer(lambda: {7, 8}, LATER) as first, Tracer(lambda: {9}, LATER) as second:
        plugins = [Plugin(first), Plugin(second)]
        yield [first, second], plugins
        for plugin in plugins:
            plugin.end()


Pair = tuple[list[Tracer], list[Plugin]]


def checkpoint(tracers: list[Tracer], work: Callable[[], None], limit: float = LATER) -> bool:
    until = time.monotonic() + limit
    return checkpoint_turn(tracers, lambda: THREADS, work, lambda: None, until)


def test_both_turns(pair: Pair) -> None:
    tracers, (first, second) = pair
    done: list[str] = []
    for plugin in (first, second):
        plugin.says("c ready", "c runs")
    assert checkpoint(tracers, lambda: done.append("saved"))
    assert (first.hears(), first.hears()) == ("c run 7:70 8:80", "c hold")
    assert (second.hears(), second.hears()) == ("c run 9:90", "c hold")
    for plugin in (first, second):
        plugin.says("r ready", "r runs")
    restore_turn(tracers, lambda: THREADS, lambda: done.append("back"), lambda: None)
    assert (first.hears(), first.hears()) == ("r run 7:70 8:80", "r hold")
    assert done == ["saved", "back"]


@pytest.mark.parametrize(
    "said",
    [
        (),
        ("c runs",),
        ("r ready",) * 9,
        ("c run 1:1",),
        ("c failed",),
        ("c ready", "c failed"),
        ("c ready", "c ready"),
        ("c",),
        ("\0" * 99,),
        ("",),
    ],
    ids=str,
)
def test_who_says_what_it_must_not_is_left(said: tuple[str, ...], pair: Pair) -> None:
    """The driver does not begin; nobody waits for more; the other CRIU gives up."""
    tracers, (first, second) = pair
    first.says(*said)
    first.end()
    second.says("c ready", "c runs")
    begun: list[int] = []
    assert not checkpoint(tracers, lambda: begun.append(1))
    assert not begun
    heard = second.hears()
    assert (second.hears() if heard.startswith("c run") else heard) == "c give-up"
    # The other comes to its end, and the driver brings all back, whatever became of the first.
    second.says("r failed", "r runs")
    failed: list[int] = []
    restore_turn(
        tracers, lambda: THREADS, lambda: begun.append(2), lambda: None, lambda: failed.append(1)
    )
    assert begun == [2]
    assert failed
    assert (second.hears(), second.hears()) == ("r run 9:90", "r hold")


def test_the_driver_fails(pair: Pair) -> None:
    tracers, plugins = pair
    for plugin in plugins:
        plugin.says("c ready", "c runs")
    with pytest.raises(ZeroDivisionError):
        checkpoint(tracers, lambda: print(1 // 0))
    for plugin in plugins:
        assert plugin.hears().startswith("c run")
        assert plugin.hears() == "c give-up"


def test_it_is_cancelled_while_it_waits(pair: Pair) -> None:
    tracers, (first, second) = pair
    first.says("c ready")

    def cancelled() -> None:
        raise Cancelled("the job was cancelled", hint="a test did that")

    with pytest.raises(Cancelled):
        checkpoint_turn(tracers, lambda: THREADS, lambda: None, cancelled, time.monotonic() + LATER)
    assert first.hears() == second.hears() == "c give-up"


def test_the_driver_takes_too_long(pair: Pair) -> None:
    """CRIU lets the program go, which may be what the driver waits for."""
    tracers, plugins = pair
    for plugin in plugins:
        plugin.says("c ready", "c runs")

    def work() -> None:
        for plugin in plugins:
            assert plugin.hears().startswith("c run")
            assert plugin.hears() == ""

    with pytest.raises(Timeout, match="in time"):
        checkpoint(tracers, work, limit=0.01)
    assert all(tracer.gone and not tracer.waits for tracer in tracers)


def test_bringing_back_takes_too_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTORE_SECONDS", 0.01)
    tracers, plugins = pair
    for plugin in plugins:
        plugin.says("r ready", "r runs")

    def work() -> None:
        for plugin in plugins:
            assert plugin.hears().startswith("r run")
            assert plugin.hears() == ""

    with pytest.raises(Timeout, match="in time"):
        restore_turn(tracers, lambda: THREADS, work, lambda: None)
