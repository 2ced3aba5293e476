"""Provide a fake polkit on the test's bus, with verdicts set by the test."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from phosd.bus import Call, Connection

NAME = "org.freedesktop.PolicyKit1"
YES, NO, CHALLENGE = [True, False, {}], [False, False, {}], [False, True, {}]


@dataclass(frozen=True)
class Question:
    """The arguments of a CheckAuthorization call. ``subject`` is a connection's name, or a pid."""

    kind: str
    subject: str
    action: str
    details: dict[str, str]
    may_ask_user: bool
    ticket: str


@dataclass
class Authority:
    """The fake polkit: ``verdicts`` by action, and a default for all others. An action in
    ``silent`` gets no reply before its check is cancelled.
    """

    connection: Connection
    default: list[Any]
    verdicts: dict[str, list[Any]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    questions: list[Question] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def take(self, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self.connection.reply(call, self.answer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def gone(self, client: str) -> None:
        """Do nothing: every check ends by itself."""

    def lost(self) -> None:
        """Do nothing, for the same reason."""

    async def answer(self, call: Call) -> tuple[str, list[Any]]:
        if call.member == "CancelCheckAuthorization":
            self.cancelled += call.args
            return "", []
        assert (call.member, call.signature) == ("CheckAuthorization", "(sa{sv})sa{ss}us")
        (kind, subject), action, details, flags, ticket = call.args
        name = subject["name"] if kind == "system-bus-name" else str(subject["pid"])
        self.questions.append(Question(kind, name, action, details, bool(flags), ticket))
        while action in self.silent and ticket not in self.cancelled:
            await asyncio.sleep(0.02)
        return "(bba{ss})", [self.verdicts.get(action, self.default)]


@contextmanager
def authority(address: str, default: list[Any]) -> Iterator[Authority]:
    """Run the fake polkit until the end of the block."""
    loop = asyncio.new_event_loop()
    stop, ready = asyncio.Event(), threading.Event()
    made: list[Authority] = []

    async def run() -> None:
        connection = await Connection.open(address)
        made.append(Authority(connection, default))
        connection.serve(made[0])
        assert await connection.own(NAME)
        ready.set()
        await stop.wait()
        connection.close()
        await connection.closed()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60), "the stand-in for polkit did not start"
    try:
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
