"""Run commands outside of phosd's sandbox.

A process dumped from a private mount namespace can never be restored, and a restored process
inherits the sandbox that CRIU runs in. Under systemd phosd runs in one. So it sends the command
line, environment and descriptors to a socket unit; systemd starts a service for each connection.
The service is this file, run as a script: it runs the command and reports how it ended. It does not
end with phosd. It imports nothing of phosd, so that it starts in milliseconds and can be reviewed
alone.

The service sends its pid and namespaces, phosd the command, the service the result. Before the
result phosd may send :data:`KILL`.
"""

import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOCKET = "criu.sock"
"""Name of the socket in the runtime folder."""
KILL = b"kill"
MOST_BYTES = 128 << 10
"""Size of the longest packet."""
MOST_DESCRIPTORS = 250
"""The kernel passes 253 in one message."""
_SAID_BYTES = 32 << 10
_TIMEOUT = 30.0
_LISTENING = 3
"""Number of the first descriptor that systemd passes to a service (``sd_listen_fds(3)``)."""


class OutsideError(Exception):
    """The service does not exist, or has ended without a result."""


def namespaces(address: Path) -> dict[str, str]:
    """Return the namespaces of the service, by kind. Raises :class:`OutsideError`."""
    service, greeting = _connect(address)
    service.close()
    found: dict[str, str] = greeting["namespaces"]
    return found


class Command:
    """A command that runs in the service behind ``address``, with a part of ``Popen``'s interface.

    ``descriptors`` have the same numbers there as here. A ``tied`` command is killed when this
    process ends. Raises :class:`OutsideError`.
    """

    def __init__(
        self,
        address: Path,
        command: Sequence[str],
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        *,
        tied: bool,
    ) -> None:
        order = {
            "command": list(command),
            "descriptors": list(descriptors),
            "environment": dict(environment),
            "tied": tied,
        }
        packet = json.dumps(order).encode()
        if len(packet) > MOST_BYTES or len(descriptors) > MOST_DESCRIPTORS:
            raise OutsideError("the command is too long")
        self.returncode: int | None = None
        self.said = ""
        self._service, greeting = _connect(address)
        self.pid: int = greeting["pid"]
        """The service's process, whose child the command is."""
        try:
            socket.send_fds(self._service, [packet], list(descriptors))
            self._service.setblocking(False)
        except OSError as error:
            self._service.close()
            raise OutsideError(f"{address} does not take commands: {error}") from error

    def fileno(self) -> int:
        """Return a descriptor that is readable when the command has ended."""
        return self._service.fileno()

    def poll(self) -> int | None:
        """Return the exit status if the command has ended, as ``Popen.returncode``.

        ``said`` is then the end of its standard error. Raises :class:`OutsideError`.
        """
        if self.returncode is None:
            try:
                packet = self._service.recv(MOST_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                packet = b""
            if not packet:
                raise OutsideError("the service that ran the command has ended")
            end = json.loads(packet)
            self.returncode, self.said = int(end["status"]), str(end["said"])
        return self.returncode

    def kill(self) -> None:
        """Kill the command and wait for its end, for a while if the service does not answer."""
        with contextlib.suppress(OSError, OutsideError):
            self._service.send(KILL)
            give_up = time.monotonic() + _TIMEOUT
            while self.poll() is None and time.monotonic() < give_up:
                select.select([self._service], [], [], 1.0)

    def close(self) -> None:
        """Close the connection to the service."""
        self._service.close()


def _connect(address: Path) -> tuple[socket.socket, dict[str, Any]]:
    service = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        service.settimeout(_TIMEOUT)
        service.connect(str(address))
        _require_same_user(service)
        greeting = service.recv(MOST_BYTES)
        if not greeting:
            raise ConnectionError("its service ended at once")
        return service, json.loads(greeting)
    except OSError as error:
        service.close()
        raise OutsideError(f"{address} does not take commands: {error}") from error


def main() -> None:
    """Run the service: one connection, one command."""
    service = socket.socket(fileno=_LISTENING)
    _require_same_user(service)
    here = {link.name: str(link.readlink()) for link in Path("/proc/self/ns").iterdir()}
    service.send(json.dumps({"pid": os.getpid(), "namespaces": here}).encode())
    order, received = _receive(service)
    if not order:
        return  # phosd only asked for the namespaces
    numbers: list[int] = order["descriptors"]
    service = _place(service, received, numbers)
    with os.fdopen(os.memfd_create("said"), "r+b") as said:
        child = subprocess.Popen(
            order["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=numbers,
            start_new_session=True,
            env=order["environment"],
        )
        for number in numbers:
            os.close(number)
        _attend(service, child, tied=order["tied"])
        length = said.seek(0, os.SEEK_END)
        said.seek(max(0, length - _SAID_BYTES))
        end = {"status": child.wait(), "said": said.read().decode(errors="replace")}
    with contextlib.suppress(OSError):  # phosd has ended
        service.send(json.dumps(end).encode())


def _attend(service: socket.socket, child: "subprocess.Popen[bytes]", *, tied: bool) -> None:
    """Wait for the command's end. Kill it on a word of phosd, or on its end if it is tied."""
    ended = os.pidfd_open(child.pid)
    poller = select.poll()
    for one in (ended, service.fileno()):
        poller.register(one, select.POLLIN)
    while ended not in (found := dict(poller.poll())):
        if service.fileno() in found:
            word = b""
            with contextlib.suppress(OSError):
                word = service.recv(len(KILL))
            if word == KILL or (tied and not word):
                child.kill()
            if not word:
                poller.unregister(service)
    os.close(ended)


def _receive(service: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the order and its descriptors; an empty order if there is none."""
    service.settimeout(_TIMEOUT)
    packet, received, flags, _ = socket.recv_fds(
        service, MOST_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    service.settimeout(None)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ValueError("the command did not arrive whole")
    if not packet:
        return {}, []
    order: dict[str, Any] = json.loads(packet)
    numbers = order["descriptors"]
    if (
        len(numbers) != len(received)
        or len({*numbers}) != len(numbers)
        or min(numbers, default=3) < 3
    ):
        raise ValueError("the descriptors are not those that the command names")
    return order, received


def _place(
    service: socket.socket, received: Sequence[int], numbers: Sequence[int]
) -> socket.socket:
    """Give the descriptors their numbers, and the socket, which may have one of these, another."""
    free = max(numbers, default=_LISTENING) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, free) for one in received]
    aside = socket.socket(fileno=fcntl.fcntl(service, fcntl.F_DUPFD_CLOEXEC, free))
    service.close()
    for one in received:
        os.close(one)
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)
    return aside


def _require_same_user(connected: socket.socket) -> None:
    """Raise :class:`PermissionError` unless the peer runs as our user or as root."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (0, os.geteuid()):
        raise PermissionError(f"user {uid} is at the other end")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"no command was run: {error}")
