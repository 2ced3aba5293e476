"""Start a program in a pid namespace of its own, which phosd makes.

There the program's pids are free wherever and whenever it is restored. Its keeper, a process that
phosd has made, connects to a socket of ours, and gets what is to be started: the other side is
``phosd/engine/program/keeper.py``.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from phosd import unix_sockets
from phosd.cli.run_command.program import END, await_end
from phosd.client import Client
from phosd.client.errors import CommandError

_LENGTH = struct.Struct("!I")
_IDS = struct.Struct("3i")
_TIMEOUT = 30.0


@dataclass(frozen=True)
class EnclosedProgram:
    """A program in a pid namespace of its own: no child of ours."""

    pid: int
    folder: Path

    @property
    def stdout(self) -> Path:
        return self.folder / "stdout"

    @property
    def stderr(self) -> Path:
        return self.folder / "stderr"

    @property
    def outputs(self) -> list[tuple[Path, int, int]]:
        return [(self.stdout, 1, 0), (self.stderr, 2, 0)]

    def status(self) -> int | None:
        """Return how it has ended; None if nobody has told within some seconds."""
        return await_end(self.folder / END)


def start_enclosed(
    client: Client, words: Sequence[str], environment: Mapping[str, str], folder: Path
) -> EnclosedProgram:
    """Start it as :meth:`~phosd.cli.run_command.program.Program.start` does, but in a namespace.

    Raises :class:`OSError` if it cannot be executed, and what phosd raises if it cannot make one.
    """
    with ExitStack() as stack:
        name = f"phos-start-{secrets.token_hex(16)}"
        listening = unix_sockets.listening(name)
        stack.callback(unix_sockets.stop_listening, listening)
        keeper = client.make_pid_namespace(name, end=str(folder / END))
        connection = _connection_of(keeper, listening)
        stack.enter_context(unix_sockets.closing(connection))
        connection.settimeout(_TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        _tell(connection, words, environment, folder)
        try:
            return EnclosedProgram(_started(connection, keeper, words[0]), folder)
        except OSError:
            shutil.rmtree(folder)
            raise


def _connection_of(keeper: int, listening: socket.socket) -> socket.socket:
    """Return the connection of the process that phosd has named: anybody may connect, and the
    others are told nothing.
    """
    give_up = time.monotonic() + _TIMEOUT
    while (left := give_up - time.monotonic()) > 0:
        listening.settimeout(left)
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            break
        if unix_sockets.peer_of(connection) == (keeper, os.geteuid()):
            return connection
        unix_sockets.close(connection)
    raise _lost(keeper)


def _tell(
    connection: socket.socket, words: Sequence[str], environment: Mapping[str, str], folder: Path
) -> None:
    umask = os.umask(0o077)
    os.umask(umask)
    order = {
        "words": list(words),
        "environment": dict(environment),
        "umask": umask,
        "folder": str(Path.cwd()),
        "stdout": str((folder / "stdout").absolute()),
        "stderr": str((folder / "stderr").absolute()),
        "ignored": [
            number
            for number in signal.valid_signals()
            if signal.getsignal(number) is signal.SIG_IGN
            and number not in (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
        ],
    }
    text = json.dumps(order).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _started(connection: socket.socket, keeper: int, command: str) -> int:
    """Return the program's pid, once it is executed. Raises :class:`OSError` if it is not."""
    try:
        data, told, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(_IDS.size))
        found = [ids for _, kind, ids in told if kind == socket.SCM_CREDENTIALS]
        why = b""
        while more := connection.recv(4096):
            why += more
    except OSError as error:
        raise _lost(keeper) from error
    if not data or not found:
        raise _lost(keeper)
    if why:
        number = int(why)
        raise OSError(number, os.strerror(number), command)
    return int(_IDS.unpack(found[0])[0])


def _lost(keeper: int) -> CommandError:
    return CommandError(
        "Internal",
        f"the program was not started: process {keeper}, which was to start it, does not answer; "
        "try again, or use --no-pidns",
    )
