"""A phosd that takes ten seconds for each call: the screens say that they wait, and go on."""

import asyncio
import threading
import time

import pytest
from textual.pilot import Pilot

from phosd.bus.dbus import Call
from phosd.client.records import Image, Job, Process
from phosd.service.dbus.call_queue import CallQueue
from phosd.tui.app import SCREENS
from phosd.tui.link import BusLink
from phosd.tui.node import Contact, Node
from tests.support.fake_engine import this_process
from tests.support.service import Service
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import text


class Slowness:
    """Holds the calls to a phosd, until the test has had its ten seconds."""

    def __init__(self) -> None:
        self.now = time.time()
        """The clock of the screens."""
        self._held: list[tuple[asyncio.AbstractEventLoop, CallQueue, Call]] = []
        self._lock = threading.Lock()

    def hold(self, queue: CallQueue, call: Call) -> None:
        with self._lock:
            self._held.append((asyncio.get_running_loop(), queue, call))

    def holds(self) -> list[str]:
        """The members that are held, in their order."""
        with self._lock:
            return [call.member for _, _, call in self._held]

    async def ten_seconds(self, pilot: Pilot[None], member: str) -> None:
        """Pass, with a call of this member unanswered; then all that are held are answered."""
        await until(pilot, lambda: member in self.holds(), f"{member} to be called")
        self.now += 10
        await until_shown(pilot, "◌ Waiting for phosd")
        self.answer()

    def answer(self) -> None:
        """Let what is held reach phosd."""
        with self._lock:
            held, self._held = self._held, []
        for loop, queue, call in held:
            loop.call_soon_threadsafe(_TAKE, queue, call)


_TAKE = CallQueue.take


@pytest.fixture
def slowness(monkeypatch: pytest.MonkeyPatch) -> Slowness:
    slow = Slowness()
    monkeypatch.setattr(CallQueue, "take", lambda queue, call: slow.hold(queue, call))
    return slow


async def look_around(pilot: Pilot[None]) -> None:
    """Every screen can be gone to, the help opened, a filter typed; then home again."""
    for number, screen in enumerate(SCREENS, 1):
        await pilot.press(str(number))
        await until(pilot, lambda: pilot.app.current_mode == screen.SCOPE, "it")  # noqa: B023
        await pilot.press("question_mark")
        await until_shown(pilot, f"{screen.TITLE_TEXT}: keys")
        await pilot.press("escape")
    await pilot.press("1", "slash", *"tr", "escape")


def test_every_call_takes_ten_seconds(service: Service, slowness: Slowness) -> None:
    service.engine.running = [this_process()]
    service.engine.go.set()

    async def body() -> None:
        node = Node(BusLink(service.address), now=lambda: slowness.now)
        async with opened(node, LARGE) as pilot:
            await look_around(pilot)
            assert node.contact is Contact.SEEKING
            await slowness.ten_seconds(pilot, "GetAll")
            await slowness.ten_seconds(pilot, "GetManagedObjects")
            await until_shown(pilot, "● phosd", "running", "train.py")
            await pilot.press("c")
            await until(pilot, lambda: "Checkpoint" in slowness.holds(), "the call")
            assert "… ● phosd" in text(pilot)
            await look_around(pilot)
            slowness.now += 10
            await until_shown(pilot, "no answer to")
            assert not service.engine.requests
            await slowness.ten_seconds(pilot, "Checkpoint")
            await until(pilot, lambda: service.engine.requests, "the checkpoint")
            assert len(node.of(Process)) == 1
            for there in (lambda: node.of(Job), lambda: node.of(Image), lambda: not node.waiting):
                while not there():
                    slowness.answer()
                    await pilot.pause(0.05)
            await until_told(pilot, "is done", "image-0")

    run(body)
