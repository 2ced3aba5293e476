"""Clients for tests that ask for much and read the answers slowly. A program of their own.

``slow_readers.py ADDRESS UID CLIENTS CALLS SECONDS MEMBER [AGAIN]``: each of the CLIENTS calls
MEMBER of the manager CALLS times and says "asked" when all have, then reads 4 KiB a second until
SECONDS are over, and calls AGAIN times more each second.
"""

import contextlib
import itertools
import os
import socket
import struct
import sys
import time

BUS = b"org.freedesktop.DBus"


def call(serial: int, path: bytes, interface: bytes, member: bytes, destination: bytes) -> bytes:
    """A method call without arguments, as the bus wants it."""
    fields = b""
    texts = ((1, b"o", path), (2, b"s", interface), (3, b"s", member), (6, b"s", destination))
    for code, kind, text in texts:
        fields += b"\0" * (-len(fields) % 8) + bytes([code, 1]) + kind + b"\0"
        fields += struct.pack("<I", len(text)) + text + b"\0"
    head = b"l\1\0\1" + struct.pack("<III", 0, serial, len(fields)) + fields
    return head + b"\0" * (-len(head) % 8)


def connect(path: str) -> socket.socket:
    """A connection that has said hello, and has read nothing since."""
    client = socket.socket(socket.AF_UNIX)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(path)
    client.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
    client.recv(99)
    client.sendall(b"BEGIN\r\n" + call(1, b"/org/freedesktop/DBus", BUS, b"Hello", BUS))
    return client


def main(address: str, clients: int, calls: int, seconds: float, member: bytes, again: int) -> None:
    end = time.monotonic() + seconds
    path = address.partition("path=")[2]
    everybody = [connect(path) for _ in range(clients)]
    serials = itertools.count(2)

    def ask(client: socket.socket, times: int) -> None:
        for serial in itertools.islice(serials, times):
            client.sendall(call(serial, b"/org/phos", b"org.phos.Manager1", member, b"org.phos"))

    for client in everybody:
        ask(client, calls)
    print("asked", flush=True)
    while time.monotonic() < end:
        for client in everybody:
            ask(client, again)
            with contextlib.suppress(BlockingIOError):  # nothing has come
                client.recv(4096, socket.MSG_DONTWAIT)
        time.sleep(1)


if __name__ == "__main__":
    _, address, uid, clients, calls, seconds, member, *again = sys.argv
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    main(address, int(clients), int(calls), float(seconds), member.encode(), int(*again))
