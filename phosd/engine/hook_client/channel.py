"""Send requests to a hook over a connection, and receive what it answers."""

import array
import contextlib
import os
import select
import socket
import time
from collections.abc import Iterable, Sequence

from phosd import unix_sockets
from phosd.engine.hook_client.answers import Garbled, printable
from phosd.engine.hook_client.distrust import Peer, distrust
from phosd.engine.hook_client.received import without_files_of_others
from phosd.engine.hook_client.wire import HEADER, MAGIC, MAX_PAYLOAD, REPLY, VERSION, Status, Type
from phosd.engine.system import stopped_state
from phosd.errors import (
    Busy,
    Internal,
    NoSuchProcess,
    OutOfMemory,
    PhosError,
    Reason,
    Timeout,
    Unsupported,
)

_CONTROL_BYTES = socket.CMSG_SPACE(253 * 4)  # as many descriptors as one message may have
DEADLINE = 30.0
"""Seconds that one request may take. Unmapping 1,170 blocks took 27 ms on an H200."""
_GIVES_DESCRIPTORS = (Type.EXPORT_BLOCKS, Type.MAKE_BLOCKS)
"""Requests whose answers have descriptors."""


class NotImportable(Internal):
    """The driver does not import this memory for the process, which can make some."""

    code = Internal.__name__


_ERRORS: dict[int, tuple[type[PhosError], str]] = {
    Status.BAD_MESSAGE: (
        Internal,
        "the hook and phosd are of different versions; restart the program",
    ),
    Status.WRONG_STATE: (Busy, "another client may be at work on this process; try again"),
    Status.UNSUPPORTED: (Unsupported, "use mode driver, or start the program anew"),
    Status.BUSY: (Busy, "try again, or raise the deadline"),
    Status.DRIVER: (Internal, "see the driver's log (dmesg)"),
    Status.OUT_OF_MEMORY: (OutOfMemory, "free device memory and try again"),
    Status.NOT_IMPORTABLE: (NotImportable, "see the driver's log (dmesg)"),
}


class Channel:
    """Requests over a connected socket, one at a time. A failed request ends the connection.

    A request that the hook refuses (:class:`PhosError`) does not end it.
    """

    def __init__(self, peer: Peer, connection: socket.socket) -> None:
        self._pid = peer.process.pid
        self._peer = peer
        self._socket = connection
        self._sequence = 0
        self._tainted = False

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """End the connection, when all that the peer has sent is received.

        One on which something came that may not be closed stays open, and so does all that is still
        in it.
        """
        if self.closed:
            return
        with contextlib.suppress(OSError):  # the peer has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.settimeout(0)
        left: list[int] = []
        with contextlib.suppress(OSError):
            while not self._tainted and self._receive_some(MAX_PAYLOAD, left):
                close_all(self._judged(left))
                left.clear()
        if self._tainted:
            self._socket.detach()
        else:
            self._socket.close()

    def await_end(self, patience: float) -> None:
        """Wait until the peer has closed its end, at most ``patience`` seconds; what it sends
        instead is left to :meth:`close`.
        """
        ends = select.poll()
        ends.register(self._socket, select.POLLRDHUP)
        ends.poll(patience * 1000)

    def request(
        self, type_: Type, payload: bytes, descriptors: Sequence[int], patience: float
    ) -> tuple[bytes, list[int]]:
        """Send a request with its descriptors, and wait for at most ``patience`` seconds in total.

        Returns the payload of the answer and its descriptors, which the caller closes. A process
        that is stopped is waited for as :mod:`~phosd.engine.system.stopped_state` has it.
        """
        end = time.monotonic() + patience
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        header = HEADER.pack(
            MAGIC, VERSION, type_, self._sequence, 0, len(payload), len(descriptors)
        )
        gives = type_ in _GIVES_DESCRIPTORS
        awaited = unix_sockets.descriptors_awaited if gives else contextlib.nullcontext
        try:
            with awaited(self._socket):
                self._send(header + payload, descriptors, end)
                status, body, received = self._reply(type_, end)
        except TimeoutError as error:
            self.close()
            raise Timeout(
                f"the hook of process {self._pid} did not answer {type_.name} in {patience:.3g} s",
                hint="the process may be stopped; see `phos doctor`",
            ) from error
        except Busy as stopped:
            self.close()
            raise Timeout(
                f"the hook of process {self._pid} did not answer {type_.name}: {stopped.what}",
                hint=stopped.hint,
            ) from stopped
        except OSError as error:
            self.close()
            raise NoSuchProcess(
                f"the hook of process {self._pid} went away during {type_.name}"
                f" ({error.strerror or error})",
                hint="the process may have ended: see `phos ps`",
            ) from error
        except Garbled as error:
            raise self.broken(str(error)) from None
        if status == Status.OK:
            return body, received
        close_all(received)
        if status == Status.BAD_MESSAGE:
            self.close()  # the hook does the same
        kind, hint = _ERRORS.get(status, (Internal, "report this with the versions of both"))
        reason = Reason.NOT_PARKABLE if kind is Unsupported else ""
        raise kind(f"process {self._pid}: {printable(body)}", hint=hint, reason=reason)

    def broken(self, what: str) -> Internal:
        """End the connection. Returns the error for an answer that violates the protocol."""
        self.close()
        return Internal(
            f"the hook of process {self._pid} sent {what}",
            hint="the hook and phosd are of different versions; restart the program",
        )

    def _send(self, message: bytes, descriptors: Sequence[int], end: float) -> None:
        self._socket.settimeout(_left(end))
        sent = socket.send_fds(self._socket, [message], list(descriptors))
        if rest := message[sent:]:  # even an empty send fails once the peer has closed
            self._socket.settimeout(_left(end))
            self._socket.sendall(rest)

    def _reply(self, type_: Type, end: float) -> tuple[int, bytes, list[int]]:
        descriptors: list[int] = []
        try:
            header = HEADER.unpack(self._receive(HEADER.size, end, descriptors))
            descriptors = self._judged(descriptors)
            if self._tainted:
                raise Garbled("files or sockets instead of memory")
            magic, version, answer, sequence, status, length, count = header
            if magic == MAGIC and version != VERSION:
                raise Garbled(
                    f"an answer in version {version} of the protocol; this phosd speaks {VERSION}"
                )
            if (
                (magic, version, answer, sequence)
                != (MAGIC, VERSION, type_ | REPLY, self._sequence)
                or count != len(descriptors)
                or length > MAX_PAYLOAD
                or (descriptors and type_ not in _GIVES_DESCRIPTORS)
            ):
                raise Garbled(f"an answer to {type_.name} that does not fit it")
            body = self._receive(length, end, descriptors)
            if len(descriptors) > count:
                raise Garbled("descriptors in the middle of an answer")
            return status, body, descriptors
        except BaseException:
            close_all(self._judged(descriptors))
            raise

    def _judged(self, descriptors: Sequence[int]) -> list[int]:
        """Return the descriptors that may be closed; if there are others, the peer is not trusted
        any more.
        """
        good = without_files_of_others(descriptors)
        if len(good) < len(descriptors) and not self._tainted:
            self._tainted = True
            distrust(self._peer)
        return good

    def _receive(self, size: int, end: float, descriptors: list[int]) -> bytes:
        """Receive ``size`` bytes; add what comes with them to ``descriptors``."""
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(min(_left(end), stopped_state.LOOK_SECONDS))
            try:
                part = self._receive_some(size - len(data), descriptors)
            except TimeoutError:
                stopped_state.require_going(self._pid)
                continue
            if not part:
                raise ConnectionResetError("connection closed")
            data += part
        return bytes(data)

    def _receive_some(self, size: int, descriptors: list[int]) -> bytes:
        part, control, _, _ = self._socket.recvmsg(size, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", raw[: len(raw) - len(raw) % 4])
        return part


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def close_all(descriptors: Iterable[int]) -> None:
    """Close received descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
