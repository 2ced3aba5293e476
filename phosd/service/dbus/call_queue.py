"""Schedule D-Bus calls: users take turns, and so do the clients of one user.

A client that calls faster than it is answered delays only itself. Calls beyond its share are
refused at once, so that no flood of calls costs other users time or phosd memory. The bus keeps
answers until they are read, and takes no more from phosd when it keeps 127 MiB for all clients
together: a client that has much to read gets no further answers before.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from phosd.bus import MAX_ARGUMENTS, Call, CallError, Connection
from phosd.service.dbus.caller import Caller

CLIENT_CALLS = 64
"""Most calls of one client that may wait or run."""
USER_CALLS = 256
"""Most calls of all clients of one user that may wait or run."""
CLIENT_AT_WORK = 8
"""Most calls of one client that may run at the same time."""
USER_AT_WORK = 32
"""Most calls of one user that may run at the same time."""

CLIENT_UNREAD = 4 << 20
"""Bytes of answers that a client may leave unread; with more, none of its calls begins or is
refused.
"""
USER_UNREAD = 16 << 20
"""The same, of all clients of one user."""
CLIENT_REFUSED = 1024
"""Most refusals that are kept for a client until it has read what was sent before. By default
dbus-daemon lets a client wait for 128 answers at a time."""
_FIRST_LOOK, _SLOWEST_LOOK = 0.05, 2.0
"""Seconds between two looks at what a client has left unread: at first, and at last."""

_log = logging.getLogger(__name__)
_LIMITS = "org.freedesktop.DBus.Error.LimitsExceeded"


Answer = Callable[[Call, Caller], Awaitable[tuple[str, list[object]]]]


@dataclass
class _User:
    """The clients of one user id; the leftmost has the next turn."""

    uid: int
    clients: deque["_Client"] = field(default_factory=deque)
    calls: int = 0
    at_work: int = 0
    unread: int = 0

    @property
    def behind(self) -> bool:
        return self.unread > USER_UNREAD


@dataclass(frozen=True)
class _Refusal:
    """What a caller is told. ``call`` has only its sender and its serial left."""

    call: Call
    text: str


@dataclass(eq=False)
class _Client:
    """One connection to the bus. ``user`` is None until the bus has returned its user id.

    ``refused``: refusals that it gets once it has read more. ``unread``: bytes sent to it since the
    last look, and what it had not read then. ``watched``: whether the bus is being asked how much
    that is now.
    """

    name: str
    user: _User | None = None
    waiting: deque[Call] = field(default_factory=deque)
    refused: deque[_Refusal] = field(default_factory=deque)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    calls: int = 0
    at_work: int = 0
    unread: int = 0
    watched: bool = False

    def __str__(self) -> str:
        owner = "" if self.user is None else f" of user {self.user.uid}"
        return f"client {self.name}{owner}"

    @property
    def ready(self) -> bool:
        """Whether one more of its calls may run, or be refused."""
        may_run = bool(self.waiting) and self.at_work < CLIENT_AT_WORK
        return (may_run or bool(self.refused)) and not self.behind

    @property
    def behind(self) -> bool:
        """Whether it, or all clients of its user together, have left too much unread."""
        return self.unread > CLIENT_UNREAD or (self.user is not None and self.user.behind)


class CallQueue:
    """The implementation of :class:`phosd.bus.Server` that answers admitted calls in turn."""

    def __init__(self, connection: Connection, answer: Answer) -> None:
        self._connection = connection
        self._answer = answer
        self._clients: dict[str, _Client] = {}
        self._users: dict[int, _User] = {}
        self._order: deque[_User] = deque()
        self._awake = False

    @property
    def clients(self) -> int:
        """How many connected clients have called."""
        return len(self._clients)

    def take(self, call: Call) -> None:
        """Queue a call, or refuse it."""
        client = self._clients.get(call.sender)
        if client is None:
            client = self._clients[call.sender] = _Client(call.sender)
            self._spawn(client, self._meet(client))
        if call.too_large:
            why = f"{call.member} takes at most {MAX_ARGUMENTS} bytes"
            self._refuse(client, call, why, "send less")
        elif client.calls >= CLIENT_CALLS:
            self._refuse(client, call, f"{CLIENT_CALLS} calls of {call.sender} wait for answers")
        elif client.user is not None and client.user.calls >= USER_CALLS:
            self._refuse(client, call, _too_many(client.user))
        else:
            client.waiting.append(call)
            self._count(client, 1)
            self._wake()

    def _refuse(
        self, client: _Client, call: Call, why: str, hint: str = "call again when some have come"
    ) -> None:
        """Refuse a call: at once, or when the client has read what was sent before."""
        bare = replace(call, body=b"", path="", member="", signature="", interface=None)
        refusal = _Refusal(bare, f"{why}; {hint}")
        if not client.behind:
            self._send(client, refusal)
        elif call.wants_reply and len(client.refused) < CLIENT_REFUSED:
            client.refused.append(refusal)

    def _send(self, client: _Client, refusal: _Refusal) -> None:
        sent = self._connection.refuse(refusal.call, _LIMITS, refusal.text)
        self._count_unread(client, sent)

    def gone(self, name: str) -> None:
        """Drop the calls of a client that left the bus. Its jobs go on."""
        client = self._clients.pop(name, None)
        if client is None:
            return
        self._count(client, -len(client.waiting))
        client.waiting.clear()
        if (user := client.user) is not None:
            user.unread -= client.unread
            user.clients.remove(client)
            if not user.clients:
                del self._users[user.uid]
                self._order.remove(user)
        for task in client.tasks:
            task.cancel()
        self._wake()

    def lost(self) -> None:
        """Drop all clients."""
        for name in list(self._clients):
            self.gone(name)

    async def _meet(self, client: _Client) -> None:
        """Ask the bus for a new client's user id."""
        try:
            uid = await self._connection.uid_of(client.name)
        except CallError:  # it has left already
            self.gone(client.name)
            return
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User(uid)
            self._order.append(user)
        client.user = user
        user.clients.append(client)
        user.calls += client.calls
        user.unread += client.unread
        while user.calls > USER_CALLS and client.waiting:
            self._count(client, -1)
            self._refuse(client, client.waiting.pop(), _too_many(user))
        self._wake()

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._begin_next)

    def _begin_next(self) -> None:
        """Begin one call per iteration, so that the event loop can do other work in between."""
        self._awake = False
        client = self._next()
        if client is None or client.user is None:
            return
        if client.refused:
            self._send(client, client.refused.popleft())
            self._wake()
            return
        call, user = client.waiting.popleft(), client.user
        caller = Caller(user.uid, client.name, call.interactive)
        user.at_work += 1
        client.at_work += 1
        task = self._spawn(client, self._reply(client, call, caller))

        def done(_: "asyncio.Task[None]") -> None:
            user.at_work -= 1
            client.at_work -= 1
            self._count(client, -1)
            self._wake()

        task.add_done_callback(done)
        self._wake()

    async def _reply(self, client: _Client, call: Call, caller: Caller) -> None:
        await self._connection.reply(
            call, lambda call: self._answer(call, caller), partial(self._admit, client)
        )

    async def _admit(self, client: _Client, size: int) -> None:
        """Wait until a client has read most of what it was sent, and count what it gets next."""
        while client.behind:
            await asyncio.sleep(_FIRST_LOOK)
        self._count_unread(client, size)

    def _count_unread(self, client: _Client, size: int) -> None:
        """Count bytes that were sent to a client, or less than zero that it has read, and watch
        those of its user that are behind.
        """
        client.unread += size
        if (user := client.user) is not None:
            user.unread += size
        for each in user.clients if user is not None and user.behind else (client,):
            if each.behind and each.unread and not each.watched:
                each.watched = True
                self._spawn(each, self._watch(each))

    async def _watch(self, client: _Client) -> None:
        """Ask the bus what a client has not read, until that is little."""
        delay, told = _FIRST_LOOK, False
        try:
            while client.behind and client.unread:
                before = client.unread
                left = await self._connection.unread_by(client.name)
                # What is sent during the question stays counted, whether it is in what is left or
                # not.
                self._count_unread(client, (left or 0) - before)
                self._wake()
                if client.behind and client.unread:
                    if delay == _SLOWEST_LOOK and not told:
                        _log.warning("%s has %d bytes of answers to read", client, client.unread)
                        told = True
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _SLOWEST_LOOK)
        finally:
            client.watched = False

    def _next(self) -> _Client | None:
        """Return the next client of the next user."""
        for _ in range(len(self._order)):
            user = self._order[0]
            self._order.rotate(-1)
            if user.at_work >= USER_AT_WORK:
                continue
            for _ in range(len(user.clients)):
                client = user.clients[0]
                user.clients.rotate(-1)
                if client.ready:
                    return client
        return None

    def _spawn(self, client: _Client, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        client.tasks.add(task)
        task.add_done_callback(client.tasks.discard)
        return task

    @staticmethod
    def _count(client: _Client, calls: int) -> None:
        client.calls += calls
        if client.user is not None:
            client.user.calls += calls


def _too_many(user: _User) -> str:
    return f"{USER_CALLS} calls of uid {user.uid} wait for answers"
