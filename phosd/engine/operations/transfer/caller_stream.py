"""Exchange bytes with the program that has called phosd, over a socket at which it listens.

phosd opens none of a user's files or addresses: the user's own program does that, and what it reads
and writes there goes over this stream. It may be slow, silent or gone at any moment; who waits for
it can be cancelled.
"""

import math
import re
import select
import socket
import time
from typing import Self

from phosd import unix_sockets
from phosd.engine.job.cancellation import Cancellation
from phosd.errors import Cancelled, InvalidOption, NotAuthorized, Timeout

STALL = 600.0
"""Seconds without a byte after which the other side is given up. It may be asking for a password,
or be writing 64 MiB to somewhere far away.
"""
_NAME = re.compile("[0-9A-Za-z._-]{1,100}")
_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_AT_ONCE = 1 << 20


class CallerStream:
    """A connection to the abstract socket ``name`` of a process of user ``uid``.

    Everything raises :class:`Cancelled` if the other side closes it or ``cancellation`` says so,
    and :class:`Timeout` after ``patience`` seconds without a byte, or if all of it takes longer
    than ``within`` seconds.
    """

    def __init__(
        self,
        name: str,
        uid: int,
        cancellation: Cancellation,
        *,
        patience: float = STALL,
        within: float = math.inf,
    ) -> None:
        self._cancellation = cancellation
        self._patience = patience
        self._within = within
        self._end = time.monotonic() + within
        self._socket = _connected(name, uid)
        self._poll = select.poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        unix_sockets.close(self._socket)

    def send(self, data: "bytes | memoryview") -> None:
        """Send all of it."""
        left = memoryview(data)
        while left:
            self._wait(select.POLLOUT)
            try:
                left = left[self._socket.send(left[:_AT_ONCE]) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError) as error:
                raise _gone() from error

    def receive(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        data = bytearray()
        while len(data) < count:  # it grows as bytes come: what is announced may never come
            part = memoryview(bytearray(min(count - len(data), _AT_ONCE)))
            data += part[: self._receive_some(part)]
        return bytes(data)

    def receive_into(self, buffer: memoryview) -> None:
        """Fill ``buffer``."""
        while buffer:
            buffer = buffer[self._receive_some(buffer) :]

    def _receive_some(self, buffer: memoryview) -> int:
        while True:
            self._wait(select.POLLIN)
            try:
                count = unix_sockets.receive_into(self._socket, buffer)
            except BlockingIOError:
                continue
            except ConnectionError as error:
                raise _gone() from error
            if not count:
                raise _gone()
            return count

    def _wait(self, event: int) -> None:
        give_up = time.monotonic() + self._patience
        self._poll.register(self._socket, event)
        while True:
            self._cancellation.check()
            now = time.monotonic()
            if now > self._end:
                raise Timeout(
                    f"what the program that asked for the transfer sends takes longer than "
                    f"{self._within:.0f} s",
                    hint="see what it waits for, and start it again",
                )
            if self._poll.poll(_LOOK_SECONDS * 1000):
                return
            if now > give_up:
                raise Timeout(
                    f"the program that asked for the transfer has neither read nor written for "
                    f"{self._patience:.0f} s",
                    hint="see what it waits for, and start it again",
                )


def _connected(name: str, uid: int) -> socket.socket:
    """Return a connection to the socket. The listener must be the user that has called."""
    if not _NAME.fullmatch(name):
        raise InvalidOption(
            f"{name[:200]!r} is no name of a socket that phosd takes",
            hint="use up to 100 letters, digits, and any of . _ -",
        )
    found = unix_sockets.unix_socket()
    try:
        found.settimeout(_CONNECT_SECONDS)
        try:
            found.connect(f"\0{name}")
        except OSError as error:
            raise InvalidOption(
                f"nobody takes what phosd has to say at the abstract socket {name} ({error})",
                hint="listen there before you call, in the network namespace of phosd",
            ) from error
        _, listening = unix_sockets.peer_of(found)
        if listening != uid:
            raise NotAuthorized(
                f"uid {listening} listens at the abstract socket {name}, and uid {uid} has called",
                hint="listen there before you call, at a name that nobody can guess",
            )
    except BaseException:
        unix_sockets.close(found)
        raise
    found.setblocking(False)
    return found


def _gone() -> Cancelled:
    return Cancelled(
        "the program that asked for the transfer has closed the connection before its end",
        hint="it says why; nothing of it was kept here",
    )
