"""Make unix sockets that take no descriptors, and close those in which some may lie.

Whoever reaches a unix socket may send open files to it. The kernel closes those that the reader
does not receive, in the thread that reads, and those that nobody has read, in the thread that
closes the socket. To close a file may take as long as its sender likes: a TCP socket waits for
its peer (``SO_LINGER``). No event loop and no job may wait for that.

So every socket that others can reach, phosd's or its programs', is made, read and closed here.
A socket that is made here takes no descriptors (``SO_PASSRIGHTS``, Linux 6.16), and neither do the
connections that it accepts: who sends some is told ``EPERM``. An older kernel passes them. There
nothing is received before a look at it has shown that no descriptors come with it, and a connection
in which some lie is closed by another process, as that ends: the kernel does not wait then.
"""

import contextlib
import errno
import logging
import os
import queue
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PASS_RIGHTS = 83
"""``SO_PASSRIGHTS`` of ``asm-generic/socket.h``."""
PEER_HANDLE = 77
"""``SO_PEERPIDFD``."""
_UNKNOWN_OPTION = (errno.ENOPROTOOPT, errno.EOPNOTSUPP)
_CREDENTIALS = struct.Struct("3i")
_AT_ONCE = 1 << 16
_TOGETHER = 200
"""Most connections that one process closes."""
_START_SECONDS = 0.2
"""Seconds that other processes may take from their fork to ``execve``."""
_log = logging.getLogger(__name__)


class DescriptorsSent(ConnectionError):
    """The peer has sent descriptors, which nobody had asked for."""

    def __init__(self) -> None:
        super().__init__("the other side has sent descriptors, which nobody has asked for")


def unix_socket(
    kind: socket.SocketKind = socket.SOCK_STREAM, *, descriptors: bool = False
) -> socket.socket:
    """Return a new socket. ``descriptors``: it takes some; nobody but root may reach it then."""
    made = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    return made if descriptors else _closed_to_descriptors(made)


def pair(
    kind: socket.SocketKind = socket.SOCK_STREAM, *, descriptors: bool = False
) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection. ``descriptors``: as of :func:`unix_socket`."""
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    if descriptors:
        return one, other
    return _closed_to_descriptors(one), _closed_to_descriptors(other)


def listening(
    address: "Path | str",
    *,
    mode: int = 0o600,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    backlog: int = 128,
    descriptors: bool = False,
) -> socket.socket:
    """Return a socket that listens at a path with this mode, or at an abstract name (a text).

    ``descriptors``: as of :func:`unix_socket`.
    """
    made = unix_socket(kind, descriptors=descriptors)
    try:
        if isinstance(address, Path):
            os.fchmod(made.fileno(), mode)  # nobody else connects before the mode is right
            made.bind(str(address))
            address.chmod(mode)  # the umask has taken some of it
        else:
            made.bind(f"\0{address}")
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


def stop_listening(listener: socket.socket) -> None:
    """Close a listening socket, and the connections that nobody has accepted."""
    if takes_descriptors(listener):
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # nobody connects any more
        listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                close(listener.accept()[0])
    listener.close()


@contextlib.contextmanager
def descriptors_awaited(connection: socket.socket) -> Iterator[None]:
    """Let a connection take descriptors inside: the reader must receive and judge all that come."""
    _pass_descriptors(connection, wanted=True)
    try:
        yield
    finally:
        if connection.fileno() >= 0:
            _pass_descriptors(connection, wanted=False)


def receive(connection: socket.socket, size: int) -> bytes:
    """Return what has come, at most ``size`` bytes, as ``recv`` does. Raises
    :class:`DescriptorsSent`, and never lets the kernel close what others have sent.
    """
    data = bytearray(size)
    with memoryview(data) as view:
        count = receive_into(connection, view)
    return bytes(data[:count])


def receive_into(connection: socket.socket, buffer: memoryview) -> int:
    """Fill ``buffer`` with what has come, and return the number of bytes, as :func:`receive`."""
    if not takes_descriptors(connection):
        return connection.recv_into(buffer)
    # To look duplicates the descriptors, and the kernel closes no last one.
    count, _, flags, _ = connection.recvmsg_into([buffer], 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise DescriptorsSent
    return connection.recv_into(buffer[:count]) if count else 0


def close(connection: socket.socket) -> None:
    """Close a connection. The caller never waits for what is still in it."""
    if connection.fileno() >= 0 and takes_descriptors(connection) and _holds_some(connection):
        abandon(connection.detach())
    else:
        connection.close()


def let_go(descriptor: int) -> None:
    """Close an end of a connection that another process has, too, and goes on with. That may have
    ended, and this be the last one.
    """
    with socket.socket(fileno=descriptor) as end:
        if takes_descriptors(end):
            abandon(end.detach())


def abandon(descriptor: int) -> None:
    """Close a socket that others have sent, or in which something of theirs lies. The caller
    does not wait for that.
    """
    _closer.take(descriptor)


@contextlib.contextmanager
def closing(connection: socket.socket) -> Iterator[socket.socket]:
    """Close a connection at the end, as :func:`close`."""
    try:
        yield connection
    finally:
        close(connection)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of who connected to, or listened at, the other end. The pid
    is 0 of who is in no pid namespace of ours; the process may have ended, and another one have
    its pid (see :func:`peer_lives`).
    """
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    return pid, uid


def peer_lives(connection: socket.socket) -> bool:
    """Return whether the process at the other end has not ended, so that its pid is still its own.
    A kernel before Linux 6.5 does not tell, and this returns True.
    """
    try:
        handle = connection.getsockopt(socket.SOL_SOCKET, PEER_HANDLE)
    except OSError as error:
        return error.errno in _UNKNOWN_OPTION
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return not poller.poll(0)
    finally:
        os.close(handle)


def takes_descriptors(connection: socket.socket) -> bool:
    """Return whether descriptors can come over this socket."""
    try:
        return bool(connection.getsockopt(socket.SOL_SOCKET, PASS_RIGHTS))
    except OSError:
        return True


def _closed_to_descriptors(made: socket.socket) -> socket.socket:
    _pass_descriptors(made, wanted=False)
    return made


def _pass_descriptors(made: socket.socket, *, wanted: bool) -> None:
    try:
        made.setsockopt(socket.SOL_SOCKET, PASS_RIGHTS, wanted)
    except OSError as error:
        if error.errno not in _UNKNOWN_OPTION:
            raise


def _holds_some(connection: socket.socket) -> bool:
    """Return whether descriptors may lie in a connection, which ends. What else does is dropped."""
    with contextlib.suppress(OSError):  # the peer has ended it
        connection.shutdown(socket.SHUT_RDWR)  # nothing comes any more
    # An empty message comes with its sender's credentials then, and the end without any.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)
    stream = connection.type == socket.SOCK_STREAM
    room = socket.CMSG_SPACE(_CREDENTIALS.size)
    look = socket.MSG_PEEK | socket.MSG_DONTWAIT
    with contextlib.suppress(OSError):  # nothing is left, and the peer had not read everything
        while True:
            data, told, flags, _ = connection.recvmsg(_AT_ONCE, room, look)
            if flags & socket.MSG_CTRUNC:
                return True
            if not data and (stream or not told):
                return False
            connection.recv(len(data) or 1, socket.MSG_DONTWAIT)
    return False


class _Closer:
    """A thread that has processes close what nobody may wait for."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, descriptor: int) -> None:
        self._left.put(descriptor)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a fork has none
                self._thread = threading.Thread(target=self._run, daemon=True, name="closer")
                self._thread.start()

    def _run(self) -> None:
        holders: list[subprocess.Popen[bytes]] = []
        while True:
            descriptors = [self._left.get()]
            with contextlib.suppress(queue.Empty):
                while len(descriptors) < _TOGETHER:
                    descriptors.append(self._left.get_nowait())
            holders = [each for each in holders if each.poll() is None]
            try:
                holder = subprocess.Popen(
                    ["cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=descriptors,
                )
            except OSError as error:
                _log.error("%d connections stay open for ever: %s", len(descriptors), error)
                continue
            for descriptor in descriptors:  # the process still has it, so this takes no time
                os.close(descriptor)
            # What was being started meanwhile has copies, and must not close the last one, either.
            time.sleep(_START_SECONDS)
            assert holder.stdin is not None
            holder.stdin.close()  # it ends
            holders.append(holder)


_closer = _Closer()
