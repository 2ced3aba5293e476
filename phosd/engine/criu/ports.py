"""Take the ports of a saved tree back from connections that have ended.

For a minute after its end the kernel keeps a connection (``TIME_WAIT``), and with it the port from
whoever wants to listen there anew. The saved program had it all the same, as it listened before.
The fields are those of ``sk-inet.proto``.
"""

import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from phosd.engine.criu.image_file import entries
from phosd.engine.image.cpu_manifest import Connection
from phosd.engine.system import tcp

_FILE_SOCKET = 4
_PROTOCOL, _PORT = 5, 7


def take_back(folder: Path, connections: Iterable[Connection]) -> None:
    """Have the kernel forget the ended connections at the ports of the tree whose images are in
    ``folder``, and of its ``connections``.

    Raises :class:`~phosd.errors.Internal` for images that are not CRIU's.
    """
    ports = {int(end.address[1]) for each in connections for end in each.ends}
    tcp.forget_ended(ports.union(_ports(folder)))


def _ports(folder: Path) -> Iterator[int]:
    for each in entries(folder / "files.img", _FILE_SOCKET):
        port = each.get(_PORT)
        if each.get(_PROTOCOL) == socket.IPPROTO_TCP and isinstance(port, int) and port:
            yield port
