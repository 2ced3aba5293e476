"""Exchange frames with descriptors between an engine and a mover over a unix socket.

A frame is a header (payload bytes, descriptors, sequence number; 32 bits each, little-endian), then
one byte for each batch of up to 200 descriptors, which are attached to it, then the payload.
"""

import array
import contextlib
import os
import select
import socket
import struct

from phosd import unix_sockets
from phosd.engine.mover.protocol import wire
from phosd.errors import Internal, Timeout

_HEADER = struct.Struct("<III")
_BATCH = 200
"""Descriptors per message; the kernel accepts 253."""
_MAX_PAYLOAD = 1 << 30
_PART_SECONDS = 60.0
"""Seconds that the rest of a frame may take once it has begun."""


class PeerGone(Internal):
    """The peer has closed the connection or died."""


class Connection:
    """One end of a unix socket. Sending and receiving may happen on different threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the peer then sees :class:`PeerGone`."""
        self._socket.close()

    def shut_down(self) -> None:
        """End the connection, which also wakes a thread of ours that waits for a message."""
        with contextlib.suppress(OSError):  # the peer has ended it
            self._socket.shutdown(socket.SHUT_RDWR)

    def peer(self) -> tuple[int, int]:
        """Return the (pid, effective user id) of the process that created the other end."""
        return unix_sockets.peer_of(self._socket)

    def send(
        self, sequence: int, message: wire.Message, descriptors: "list[int] | None" = None
    ) -> None:
        """Send a frame. The descriptors stay open here. Raises :class:`PeerGone`."""
        fds = descriptors or []
        payload = wire.encode(message)
        try:
            self._socket.sendall(_HEADER.pack(len(payload), len(fds), sequence))
            for at in range(0, len(fds), _BATCH):
                socket.send_fds(self._socket, [b"\0"], fds[at : at + _BATCH])
            self._socket.sendall(payload)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone(f"the data mover's connection is lost ({error.strerror})") from error

    def receive(
        self, seconds: float | None
    ) -> "tuple[int, wire.Request | wire.Reply, list[int]] | None":
        """Return the next frame as (sequence, message, descriptors); None if none begins in time.

        Raises :class:`PeerGone`, and :class:`Timeout` if a frame stops in its middle.
        """
        if not self._readable(seconds):
            return None
        size, count, sequence = _HEADER.unpack(self._exactly(_HEADER.size))
        if size > _MAX_PAYLOAD:
            raise Internal(f"the data mover's peer announced a message of {size} bytes")
        descriptors: list[int] = []
        try:
            while len(descriptors) < count:
                descriptors += self._descriptors()
            return sequence, wire.decode(self._exactly(size)), descriptors
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

    def _descriptors(self) -> list[int]:
        self._await_part()
        room = socket.CMSG_SPACE(_BATCH * array.array("i").itemsize)
        flags = socket.MSG_CMSG_CLOEXEC
        data, ancillary, answer, _ = self._socket.recvmsg(1, room, flags)
        if not data:
            raise PeerGone("the data mover's connection ended")
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
        if answer & socket.MSG_CTRUNC or not fds:
            for fd in fds:
                os.close(fd)
            raise Internal(
                "descriptors of device memory did not arrive",
                hint="raise the limit of open files (LimitNOFILE) to 524288",
            )
        return fds.tolist()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._await_part()
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError:
                count = 0
            if not count:
                raise PeerGone("the data mover's connection ended")
            view = view[count:]
        return data

    def _await_part(self) -> None:
        if not self._readable(_PART_SECONDS):
            raise Timeout("a message of the data mover stopped in its middle", hint="try again")

    def _readable(self, seconds: float | None) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000))
