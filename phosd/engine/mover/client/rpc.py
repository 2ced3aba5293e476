"""Send requests to a data mover, one at a time, until it answers, dies or falls silent."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from phosd import errors
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.launcher import MoverProcess, log_of
from phosd.engine.mover.protocol import wire
from phosd.engine.mover.protocol.connection import Connection, PeerGone
from phosd.errors import Cancelled, Internal, PhosError, Timeout

SILENCE_SECONDS = 120.0
"""Seconds of silence that are allowed while a mover works; it reports after every slot."""
_POLL_SECONDS = 0.1

_R = TypeVar("_R", bound=wire.Message)
OnDropped = Callable[[Sequence[int]], object]


class RpcChannel:
    """The engine's end of a connection to the mover of GPU ``gpu``.

    Requests of several threads take turns. If the channel is ``broken``, every request raises
    :class:`Internal`. If it is also ``out_of_step``, the engine has lost its place in the stream,
    but the mover still works.
    """

    def __init__(self, gpu: int, process: MoverProcess, connection: Connection) -> None:
        self.broken = False
        self.out_of_step = False
        self._gpu = gpu
        self._process = process
        self._connection = connection
        self._sequence = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection."""
        self.broken = True
        self._connection.close()

    def ask(
        self,
        request: wire.Message,
        kind: type[_R],
        descriptors: "list[int] | None" = None,
        progress: Progress | None = None,
        dropped: OnDropped | None = None,
    ) -> tuple[_R, list[int]]:
        """Send a request and wait for its reply, passing on messages that come before it.

        ``dropped`` is called with the keys of blocks that the mover has dropped.
        """
        with self._lock:
            if self.broken:
                raise self._death()
            self._sequence += 1
            self.send(request, descriptors)
            return self.reply(kind, SILENCE_SECONDS, progress, dropped)

    def send(self, message: wire.Message, descriptors: "list[int] | None" = None) -> None:
        """Send a message that belongs to the last request."""
        try:
            self._connection.send(self._sequence, message, descriptors)
        except PeerGone:
            self.broken = True
            raise self._death() from None

    def reply(
        self,
        kind: type[_R],
        patience: float,
        progress: Progress | None = None,
        dropped: OnDropped | None = None,
    ) -> tuple[_R, list[int]]:
        """Wait for the reply to the last request, passing on messages that come before it."""
        deadline = time.monotonic() + patience
        given_up: Cancelled | None = None
        while True:
            try:
                received = self._connection.receive(_POLL_SECONDS)
            except (PeerGone, Timeout):
                self.broken = True
                raise self._death() from None
            except BaseException:  # an unknown part of a message is still unread
                self.broken = self.out_of_step = True
                raise
            if received is not None and received[0] == self._sequence:
                _, message, descriptors = received
                deadline = time.monotonic() + patience
                if isinstance(message, wire.Failed):
                    raise given_up or _error(message)
                if isinstance(message, kind):
                    return message, descriptors
                if isinstance(message, wire.Dropped) and dropped is not None:
                    self._pass_on(message.keys, dropped)
                if progress is not None and isinstance(message, wire.Moved) and not given_up:
                    progress.advance(message.byte_count)
            if time.monotonic() > deadline:
                self.broken = True
                self._process.kill()
                raise Timeout(
                    f"the data mover of GPU {self._gpu} said nothing for {patience:.0f} s and was"
                    " ended",
                    hint="see the driver's log (dmesg), and try again",
                )
            if progress is not None and given_up is None:
                try:
                    progress.check()
                except Cancelled as error:
                    given_up = error
                    self.send(wire.Cancel())

    def _pass_on(self, keys: Sequence[int], dropped: OnDropped) -> None:
        try:
            dropped(keys)
        except BaseException:
            self.send(wire.Cancel())
            raise
        self.send(wire.Settled())

    def _death(self) -> PhosError:
        """Return the error for a mover that is gone, with how it ended if that is known."""
        return Internal(
            f"the data mover of GPU {self._gpu} {self._process.end()}",
            hint=f"see {log_of(self._gpu)} and the driver's log (dmesg), and try again",
        )


def _error(failed: wire.Failed) -> PhosError:
    kind = getattr(errors, failed.code, Internal)
    if not (isinstance(kind, type) and issubclass(kind, PhosError)):
        kind = Internal
    return kind(failed.what, hint=failed.hint, reason=failed.reason)
