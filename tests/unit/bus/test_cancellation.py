"""A cancelled task ends, even if what it waited for arrives in the same moment."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from dbus_next.constants import MessageType
from dbus_next.message import Message

from phosd.bus import Connection, Signal
from phosd.bus.dbus import Bus
from phosd.tui.link import _Session
from phosd.tui.node import Update

NEWS = Signal("/org/phos", "org.phos.Manager1", "EventNew")
ANSWER = Message(
    message_type=MessageType.METHOD_RETURN, reply_serial=1, signature="s", body=["something"]
)


class StubBus:
    """A bus whose answers the test gives."""

    connected = True

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[Message]] = asyncio.Queue()

    async def ask(self, _: Message) -> Message:
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return cast(Message, await answer)


def connected(monkeypatch: pytest.MonkeyPatch, bus: StubBus) -> Connection:
    connection = Connection("nowhere", 0.0)
    monkeypatch.setattr(connection, "_bus", bus)
    return connection


async def ends(task: "asyncio.Task[Any]") -> bool:
    """Whether the task is cancelled within a moment."""
    await asyncio.wait([task], timeout=10)
    return task.cancelled()


def test_a_call_that_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        bus = StubBus()
        call = asyncio.create_task(connected(monkeypatch, bus).call("/", "a.b", "C"))
        (await bus.asked.get()).set_result(ANSWER)
        call.cancel()
        assert await ends(call)

    asyncio.run(run())


def test_a_connection_that_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def run() -> None:
        made, begun = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def connect(_: Bus) -> None:
            begun.set()
            await made

        monkeypatch.setattr(Bus, "connect", connect)
        opening = asyncio.create_task(Bus.open(f"unix:path={tmp_path}/bus", lambda _: None))
        await begun.wait()
        made.set_result(None)
        opening.cancel()
        assert await ends(opening)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bus"))
        listening.listen()
        asyncio.run(run())


def test_phos_tui_when_there_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would never end."""

    async def run() -> None:
        updates: list[Update] = []
        bus = StubBus()
        connection = connected(monkeypatch, bus)
        heard: Callable[[Signal], None] | None = None

        async def subscribe(handler: Callable[[Signal], None], *_: str) -> None:
            nonlocal heard
            heard = handler

        async def met(_: _Session) -> None:
            pass

        async def forever() -> None:
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(connection, "subscribe", subscribe)
        monkeypatch.setattr(connection, "closed", forever)
        monkeypatch.setattr(_Session, "_meet", met)
        session = asyncio.create_task(_Session(connection, "system", updates.append).run())
        await asyncio.sleep(0.05)  # it waits for news
        assert heard is not None
        heard(NEWS)
        session.cancel()
        assert await ends(session)

    asyncio.run(run())
