"""Reach the bus of another node by ssh: nothing of phosd's listens on any network.

There ``systemd-stdio-bridge`` connects to the system's bus as the user who has logged in, whose
rights are those of a caller on that node.
"""

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Self

from phosd import unix_sockets
from phosd.errors import InvalidOption, NoBus

_NODE = re.compile(r"(?!-)[\w.@:%\[\]-]{1,255}", re.ASCII)
_CONNECT_SECONDS = 10
_END_SECONDS = 2.0
_MOST_SAID = 4096


def require_node(node: str) -> None:
    """Raise :class:`InvalidOption` unless ssh can take this for a node, and for nothing else."""
    if not _NODE.fullmatch(node):
        raise InvalidOption(
            f"{node!r} is no node", hint="name it as for ssh: `gpu7`, `ann@gpu7.example.org`"
        )


class Tunnel:
    """A socket of this user's behind which is the bus of ``node``: each connection is an ssh.

    ``asks``: ssh may ask for a password on the terminal. Raises :class:`InvalidOption`.
    """

    def __init__(self, node: str, *, asks: bool = True) -> None:
        require_node(node)
        self.node = node
        self._words = ["ssh", "-xT", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
        if not asks:
            self._words += ["-o", "BatchMode=yes"]
        self._words += ["--", node, "systemd-stdio-bridge"]
        self._folder = Path(tempfile.mkdtemp(prefix="phos-"))  # nobody else may enter it
        self._said = self._folder / "said"
        self._said.touch()
        self._listener = unix_sockets.listening(self._folder / "bus")
        self._bridges: list[subprocess.Popen[bytes]] = []
        self._accepts = threading.Thread(target=self._accept, name=f"ssh-{node}", daemon=True)
        self._accepts.start()

    @property
    def address(self) -> str:
        """The D-Bus address of the socket."""
        return f"unix:path={self._folder / 'bus'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._accepts.join()
        self._listener.close()
        for bridge in self._bridges:
            bridge.terminate()
        for bridge in self._bridges:
            bridge.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def why_not(self) -> NoBus:
        """Return why there is no way to the node, after a connection has failed."""
        for bridge in self._bridges[-1:]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                bridge.wait(_END_SECONDS)
        return NoBus(
            f"there is no way to the bus of {self.node}: {self._last_words()}",
            hint=f"`ssh {self.node} systemd-stdio-bridge` must work, and wait for input",
        )

    def _last_words(self) -> str:
        """Return what ssh has said last."""
        with self._said.open("rb") as file:
            file.seek(max(0, self._said.stat().st_size - _MOST_SAID))
            said = file.read().decode(errors="replace").strip()
        return said.splitlines()[-1] if said else "ssh does not say why"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it is being closed
            with connection, self._said.open("ab") as said:
                try:
                    bridge = subprocess.Popen(
                        self._words,
                        stdin=connection.fileno(),
                        stdout=connection.fileno(),
                        stderr=said,
                    )
                except OSError as error:
                    said.write(f"ssh cannot be started ({error.strerror})".encode())
                else:
                    running = [each for each in self._bridges if each.poll() is None]
                    self._bridges = [*running, bridge]
