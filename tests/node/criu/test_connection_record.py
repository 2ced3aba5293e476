"""What an image says of TCP connections is not believed."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.criu.images.connection_record import MOST, MOST_UNREAD, require_sound
from phosd.engine.criu.kinds.reconnection import TcpReconnection
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.image.cpu_manifest import Connection, ConnectionEnd, SocketOption
from phosd.errors import ImageCorrupt, Unsupported
from tests.node.criu.life import USER

NO_DELAY = SocketOption(socket.IPPROTO_TCP, socket.TCP_NODELAY, "01000000")
OWNER = Owner(USER, USER, ())


def end(inode: int = 1, **different: Any) -> ConnectionEnd:
    fields = {"family": socket.AF_INET, "address": ("127.0.0.1", 40001), "options": (NO_DELAY,)}
    return ConnectionEnd(**{"inode": inode, **fields, **different})


def option(number: int, value: str, level: int = socket.SOL_SOCKET) -> tuple[SocketOption, ...]:
    return (SocketOption(level, number, value),)


VERSION_6: dict[str, Any] = {"family": socket.AF_INET6, "address": ("::1", 40002, 0, 0)}


@pytest.mark.parametrize(
    ("ends", "size"),
    [
        ((end(), end(2)), None),
        ((end(unread=3), end(2, unread=4)), 7),
        ((end(**VERSION_6), end(0)), None),
        ((end(flags=os.O_RDWR | os.O_NONBLOCK), end(2, finished=True, deaf=True)), None),
        ((end(options=()), end(2, options=option(socket.SO_PRIORITY, "06000000"))), None),
    ],
)
def test_what_is_saved_is_sound(ends: tuple[ConnectionEnd, ConnectionEnd], size: int) -> None:
    require_sound((Connection(ends),), size)


@pytest.mark.parametrize(
    "wrong",
    [
        {"inode": -1},
        {"inode": 1 << 32},
        {"inode": 2},  # twice
        {"unread": -1},
        {"unread": 1},  # there is no file
        {"family": socket.AF_UNIX, "address": ("/run/dbus/system_bus_socket", 1)},
        {"family": socket.AF_INET6},
        {"address": ("127.0.0.1",)},
        {"address": ("127.0.0.1", 40001, 0, 0)},
        {"address": ("localhost", 40001)},
        {"address": ("", 40001)},
        {"address": ("::1", 40001)},
        {"address": (40001, "127.0.0.1")},
        {"address": ("127.0.0.1", 0)},
        {"address": ("127.0.0.1", 65536)},
        {"family": socket.AF_INET6, "address": ("::1", 40001, 0, 1 << 32)},
        {"flags": -1},
        {"options": option(socket.SO_MARK, "01000000")},
        {"options": option(socket.SO_PRIORITY, "07000000")},
        {"options": option(socket.SO_PRIORITY, "ffffffff")},
        {"options": option(socket.SO_KEEPALIVE, "0100")},
        {"options": option(socket.SO_KEEPALIVE, "01 00 00")},
        {"options": option(socket.SO_KEEPALIVE, "nonsense")},
        {"options": option(19, "01000000", socket.IPPROTO_TCP)},  # TCP_REPAIR
    ],
)
def test_what_cannot_have_been_saved(wrong: dict[str, Any]) -> None:
    with pytest.raises(ImageCorrupt, match="TCP connections"):
        require_sound((Connection((end(**wrong), end(2))),), None)


@pytest.mark.parametrize(
    ("wanted", "size"),
    [
        ((Connection((end(0), end(0))),), None),
        ((Connection((end(0, unread=1), end(1))),), 1),
        ((Connection((end(0, finished=True), end(1))),), None),
        ((Connection((end(unread=MOST_UNREAD), end(2, unread=1))),), MOST_UNREAD + 1),
        ((Connection((end(), end(2))),), 1),
        (tuple(Connection((end(n), end(0))) for n in range(1, MOST + 2)), None),
    ],
)
def test_connections_that_cannot_have_been_saved(
    wanted: tuple[Connection, ...], size: int | None
) -> None:
    with pytest.raises(ImageCorrupt, match="TCP connections"):
        require_sound(wanted, size)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"address": ("127.0.0.1", 80)}, "127.0.0.1:80 .* only root may use"),
        ({"address": ("192.0.2.1", 40001)}, "192.0.2.1:40001 .* cannot be made"),
        (VERSION_6, "::1:40002 .* cannot be made"),
        (
            {"options": option(socket.TCP_KEEPIDLE, "ffffffff", socket.IPPROTO_TCP)},
            "cannot be made",
        ),
        ({"options": option(socket.SO_RCVTIMEO, "ff" * 16)}, "cannot be made"),
    ],
)
def test_what_cannot_be_made_here_is_unsupported(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    wanted = (Connection((end(**wrong), end(2, address=("127.0.0.1", 40003)))),)
    require_sound(wanted, None)
    before = descriptors()
    with pytest.raises(Unsupported, match=message), TcpReconnection(wanted, tmp_path, OWNER):
        pytest.fail("it was made")
    assert descriptors() == before


def test_only_whether_it_blocks_is_taken_from_the_flags(tmp_path: Path) -> None:
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_ASYNC | os.O_APPEND
    other = end(2, address=("127.0.0.1", 40003))
    with TcpReconnection((Connection((end(flags=flags), other)),), tmp_path, OWNER) as made:
        one, two = made.descriptors
        assert [os.get_blocking(one), os.get_blocking(two)] == [False, True]
        assert os.fstat(one).st_uid == USER
        with socket.socket(fileno=os.dup(one)) as here, socket.socket(fileno=os.dup(two)) as there:
            assert here.getsockname() == there.getpeername() == ("127.0.0.1", 40001)
            here.sendall(b"whole")
            assert there.recv(5, socket.MSG_WAITALL) == b"whole"
