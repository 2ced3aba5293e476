"""Take the ports of a saved tree back from connections that have ended.

For a minute after its end the kernel keeps a connection (``TIME_WAIT``), and with it the port from
whoever wants to listen there anew. The saved program had it all the same, as it listened before.
The fields are those of ``sk-inet.proto``.
"""

import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from phosd.engine.criu.image_file import ImageFile, fields, strange
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
    try:
        tcp.forget_ended(ports.union(_ports(folder)))
    except ValueError as error:
        raise strange(folder / "files.img") from error


def _ports(folder: Path) -> Iterator[int]:
    for message in ImageFile.read(folder / "files.img").messages:
        for field in fields(message):
            if field.number != _FILE_SOCKET or not isinstance(field.value, bytes):
                continue
            values = {each.number: each.value for each in fields(field.value)}
            port = values.get(_PORT)
            if values.get(_PROTOCOL) == socket.IPPROTO_TCP and isinstance(port, int) and port:
                yield port
