"""Connect to the hook in a GPU process, wake it, and hand requests to its channel."""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from phosd import unix_sockets
from phosd.engine.hook_client.answers import Garbled, unpack
from phosd.engine.hook_client.channel import DEADLINE, Channel
from phosd.engine.hook_client.distrust import Distrusted, Peer, require_trusted
from phosd.engine.hook_client.places import HookSocket, hook_socket
from phosd.engine.hook_client.wire import U64, Type
from phosd.engine.system import procfs, stopped_state
from phosd.errors import Busy, Internal, NoSuchProcess, NotAuthorized, Timeout

_EARLIER_SECONDS = 1.0
"""Seconds after which a hook that does not come may be one of an earlier version."""
WAKE_SECONDS = 10.0
"""Seconds that a detached hook has to come back."""


class HookConnection:
    """A connection to the hook of one process, which is woken if it has closed its sockets."""

    def __init__(self, pid: int, runtime_dir: Path, deadline: float = DEADLINE) -> None:
        self.pid = pid
        self.runtime_dir = runtime_dir
        self._deadline = deadline
        self._channel: Channel | None = None

    def connect(self) -> Self:
        """Connect, and check that the peer is the process: its user can write to the folder.

        Raises :class:`NoSuchProcess` if no hook listens for the pid, :class:`NotAuthorized` if
        another process does, :class:`Distrusted` if the hook has sent what it must not,
        :class:`Timeout` if it does not accept the connection.
        """
        with hook_socket(self.runtime_dir, self.pid) as place:
            try:
                peer, owner = Peer.at(place, self.pid), procfs.status(self.pid).uids[1]
                fitting = place.is_of(owner)
            except OSError as error:  # the process has ended, or nothing is there
                raise NoSuchProcess(
                    f"process {self.pid} has no hook (no {place})",
                    hint="start it with `phos run`, or use mode driver",
                ) from error
            require_trusted(peer)
            if not fitting:
                raise NotAuthorized(
                    f"{place} is not a socket of the owner of process {self.pid}",
                    hint="somebody else put it there; remove it",
                )
            self._channel = Channel(peer, self._connected(place, owner))
        return self

    def _connected(self, place: HookSocket, owner: int) -> socket.socket:
        connection = unix_sockets.unix_socket()
        connection.settimeout(self._deadline)
        try:
            place.connect(connection, owner)
            peer_pid, peer_uid = unix_sockets.peer_of(connection)
            if (peer_pid, peer_uid) != (self.pid, owner):
                raise NotAuthorized(
                    f"{place} is served by process {peer_pid} (uid {peer_uid}), not {self.pid}",
                    hint="somebody else put it there; remove it",
                )
        except (BlockingIOError, TimeoutError) as error:  # the hook's queue of connections is full
            unix_sockets.close(connection)
            raise Timeout(
                f"the hook of process {self.pid} takes no connection",
                hint="the process may be stopped, or others are at work on it; try again",
            ) from error
        except OSError as error:
            unix_sockets.close(connection)
            raise NoSuchProcess(
                f"the hook of process {self.pid} does not answer ({error.strerror or error})",
                hint="use mode driver",
            ) from error
        except NotAuthorized:
            unix_sockets.close(connection)
            raise
        return connection

    def close(self) -> None:
        """Close the connection. A closed gate opens with it, unless memory is parked."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection; a failed request ends it."""
        return self._channel is not None and not self._channel.closed

    def __enter__(self) -> Self:
        return self if self.connected else self.connect()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def reattach(self, deadline: float = DEADLINE) -> None:
        """Wake a detached hook and connect to it again.

        Raises :class:`Timeout` if it does not come back within ``deadline`` seconds, or its process
        is stopped.
        """
        with hook_socket(self.runtime_dir, self.pid, make=True) as place, place.waking():
            self._await(place, deadline)

    def _await(self, place: HookSocket, deadline: float) -> None:
        began = time.monotonic()
        give_up = began + deadline
        look = began + stopped_state.LOOK_SECONDS
        while True:
            try:
                self.connect()
                return
            except (NoSuchProcess, Timeout) as error:  # not listening yet
                why = error.what
            except Distrusted:
                raise
            except NotAuthorized as error:  # a file in its place: the hook cannot listen there
                why = error.what
                self._clear_the_way(place)
            if time.monotonic() > began + _EARLIER_SECONDS:
                place.admit_earlier()
            found = procfs.stat(self.pid)
            if found is None or found.dead:
                raise NoSuchProcess(
                    f"process {self.pid} ended before its hook came back",
                    hint="see its output for the reason",
                )
            try:
                if time.monotonic() > look:
                    look = time.monotonic() + stopped_state.LOOK_SECONDS
                    stopped_state.require_going(self.pid)
            except Busy as stopped:
                raise Timeout(
                    f"the hook of process {self.pid} did not come back: {stopped.what}",
                    hint=stopped.hint,
                ) from stopped
            if time.monotonic() > give_up:
                raise Timeout(
                    f"the hook of process {self.pid} did not come back in {deadline:.0f} s ({why})",
                    hint="the process may be stopped or wedged; see `phos doctor`",
                )
            time.sleep(0.0005)

    def _clear_the_way(self, place: HookSocket) -> None:
        with contextlib.suppress(OSError):  # it has ended, or something is mounted there
            place.clear_the_way(procfs.status(self.pid).uids[1])

    def _await_end(self, patience: float) -> None:
        if self._channel is not None:
            self._channel.await_end(patience)

    def _count(self, type_: Type, payload: bytes = b"", descriptors: Sequence[int] = ()) -> int:
        with self._decoding(type_):
            return int(unpack(U64, self._ask(type_, payload, descriptors))[0])

    def _ask(
        self,
        type_: Type,
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        until: float | None = None,
    ) -> bytes:
        """Send a request whose answer has no descriptors."""
        return self._request(type_, payload, descriptors, until)[0]

    def _request(
        self,
        type_: Type,
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        until: float | None = None,
    ) -> tuple[bytes, list[int]]:
        """Send a request. ``until``: its deadline on the monotonic clock, if not the default."""
        if self._channel is None:
            raise Internal(
                f"no connection to the hook of process {self.pid}", hint="connect it first"
            )
        if self._channel.closed:  # after a failed request
            raise NoSuchProcess(
                f"the connection to the hook of process {self.pid} was lost",
                hint="the process may have ended; try again",
            )
        patience = self._deadline if until is None else max(0.0, until - time.monotonic())
        return self._channel.request(type_, payload, descriptors, patience)

    @contextlib.contextmanager
    def _decoding(self, type_: Type) -> Iterator[None]:
        """End the connection if an answer cannot be decoded inside."""
        try:
            yield
        except Garbled as error:
            assert self._channel is not None
            raise self._channel.broken(f"{error} as an answer to {type_.name}") from None
