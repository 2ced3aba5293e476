"""Take the ports of a saved tree back from connections that have ended.

For a minute after its end the kernel keeps a connection (``TIME_WAIT``), and with it the port from
whoever wants to listen there anew. The saved program had it all the same, as it listened before.
"""

import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from phosd.engine.criu.images.fields import FileEntry, InetSkEntry
from phosd.engine.criu.images.image_file import entries
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.image.cpu_manifest import Connection
from phosd.engine.system import tcp


class PortsTakenBack(CriuPart):
    """Makes the kernel forget the ended connections at the ports of the tree whose images are in
    ``folder``, and of its ``connections``.
    """

    def __init__(self, folder: Path, connections: Iterable[Connection]) -> None:
        self._folder = folder
        self._connections = connections

    def __enter__(self) -> Self:
        """Raises :class:`~phosd.errors.Internal` for images that are not CRIU's."""
        ports = {int(end.address[1]) for each in self._connections for end in each.ends}
        tcp.forget_ended(ports.union(_ports(self._folder)))
        return self


def _ports(folder: Path) -> Iterator[int]:
    for each in entries(folder / "files.img", FileEntry.ISK):
        port = each.get(InetSkEntry.SRC_PORT)
        if each.get(InetSkEntry.PROTO) == socket.IPPROTO_TCP and isinstance(port, int) and port:
            yield port
