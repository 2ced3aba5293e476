"""What users without rights do to phosd all the time: ``python3 besiegers.py KIND JSON``.

It is run by another user's Python, so it imports nothing of ours; JSON has what it is told: ``run``
(phosd's runtime folder), ``request`` (a request for a checkpoint of itself, in hexadecimal),
``answer`` (a hook's to its first question), ``bus``, ``library`` (a file by whose name a process
counts as one that uses a GPU), and ``names`` (those in folders open to everybody that phosd might
want). Each prints a line when it has begun.
"""

import contextlib
import json
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_kept: list[object] = []
_SECONDS = 60


def _begun() -> None:
    print("begun", flush=True)


def _lingering() -> socket.socket:
    """A socket whose last close takes a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        _kept.append(server.accept()[0])
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _SECONDS))
    mine.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            mine.send(bytes(1 << 16))
    return mine


def _leave_in(address: "str | bytes") -> None:
    """Leave one in a connection to that address, and keep the connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    mine = _lingering()
    with contextlib.suppress(OSError):
        socket.send_fds(connection, [b"x"], [mine.fileno()])
        _kept.append(connection)
        os.close(mine.detach())
        return
    _kept.append(mine)


def _uses_gpu(told: dict[str, Any]) -> None:
    with Path(told["library"]).open("rb") as file:
        _kept.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def linger(told: dict[str, Any]) -> None:
    """Sockets that linger, for phosd's own socket."""
    _begun()
    while True:
        with contextlib.suppress(OSError):
            _leave_in(f"{told['run']}/program.sock")
        del _kept[:-200]
        time.sleep(0.1)


def waylay(told: dict[str, Any]) -> None:
    """Such sockets for whatever else listens for a moment, by a name that everybody can read; but
    not for the software GPU's, which are in the place of calls of the driver.
    """
    _begun()
    seen: set[bytes] = set()
    while True:
        names = re.findall(rb"@(phos(?!-softgpu)\S+)", Path("/proc/net/unix").read_bytes())
        for name in {*names} - seen:
            seen.add(name)
            with contextlib.suppress(OSError):
                _leave_in(b"\0" + name)
        time.sleep(0.005)


def import_from_nobody(told: dict[str, Any]) -> None:
    """Imports whose bytes come with such a socket, and whose callers hold them up."""
    name = f"siege-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    words = ["busctl", f"--address={told['bus']}", "call", "org.phos", "/org/phos"]
    words += ["org.phos.Manager1", "Import", "sa{sv}", name, "0"]
    _begun()
    while True:
        caller = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        listener.settimeout(20)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            _kept.append(connection)
            socket.send_fds(connection, [b"PHOS"], [_lingering().fileno()])
        caller.wait()
        time.sleep(1)


def wish(told: dict[str, Any]) -> None:
    """Requests for checkpoints of processes whose hooks take connections and never answer."""
    _uses_gpu(told)
    with contextlib.suppress(OSError):  # asking has a folder made for the hook
        _ask(told)
    for _ in range(6):
        if os.fork():
            continue
        hook = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            hook.bind(f"{told['run']}/hook/{os.getuid()}/{os.getpid()}.sock")
            hook.listen(64)
        while True:
            with contextlib.suppress(OSError):
                _ask(told)
            if not os.fork():  # its connection speaks for a process that has ended
                with contextlib.suppress(OSError):
                    _ask(told, wait=False)
                os._exit(0)
            os.wait()
            time.sleep(0.5)
    _begun()
    time.sleep(1000)


def _ask(told: dict[str, Any], *, wait: bool = True) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(f"{told['run']}/program.sock")
        connection.sendall(bytes.fromhex(told["request"]))
        if wait:
            connection.recv(300)


def crowd(told: dict[str, Any]) -> None:
    """Thousands of files in the folder of one's hooks, with the names of others' hooks."""
    _uses_gpu(told)
    folder = Path(f"{told['run']}/hook/{os.getuid()}")
    while not folder.is_dir():
        with contextlib.suppress(OSError):
            _ask(told)
        time.sleep(0.1)
    for number in range(4000):
        with contextlib.suppress(OSError):
            (folder / f"{number}.sock").symlink_to("/dev/zero")
    _begun()
    while True:
        for number in range(1, 4000, 40):
            path = folder / f"x{number}.sock"
            with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):
                listener.bind(str(path))
                listener.listen()
                path.unlink()
        time.sleep(0.1)


def squat(told: dict[str, Any]) -> None:
    """Names in folders that are open to everybody."""
    _begun()
    while True:
        for name in map(Path, told["names"]):
            with contextlib.suppress(OSError):
                name.symlink_to("/etc")
        time.sleep(0.05)


def lie(told: dict[str, Any]) -> None:
    """A hook in a container that is root there, and sends sockets instead of memory. Its ``run`` is
    that of its container.
    """
    _uses_gpu(told)
    folder = Path(f"{told['run']}/hook")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{os.getpid()}.sock")
    listener.listen(64)
    _begun()
    while True:
        connection, _ = listener.accept()
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.recv(4096)
            socket.send_fds(connection, [bytes.fromhex(told["answer"])], [_lingering().fileno()])
        _kept.append(connection)


def call(told: dict[str, Any]) -> None:
    """Calls that are refused, with line ends and escapes in what is logged of them."""
    evil = "x\n<3>phosd: all is well\x1b[2J\r"
    calls = (
        ("Checkpoint", "ua{sv}", "1", "1", "mode", "s", evil),
        ("Restore", "sa{sv}", evil, "0"),
        ("VerifyImage", "sa{sv}", evil, "0"),
        ("Suspend", "ua{sv}", "4194303", "0"),
    )
    _begun()
    while True:
        for words in calls:
            command = ["busctl", f"--address={told['bus']}", "call", "org.phos", "/org/phos"]
            subprocess.run([*command, "org.phos.Manager1", *words], capture_output=True)
        time.sleep(0.5)


KINDS: dict[str, Callable[[dict[str, Any]], None]] = {
    each.__name__: each
    for each in (linger, waylay, import_from_nobody, wish, crowd, squat, lie, call)
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](json.loads(sys.argv[2]))
