"""Find what a saved tree has that only one program at a time can have, and who has it now.

That is what has a name for all: an address that it is bound to, a unix socket's name or path, a
file lock. CRIU would fail at most of them, but not at all: it removes a unix socket whose path it
needs, it waits for a lock, and two that listen at one port may share what arrives there. The fields
are those of ``sk-unix.proto``, ``sk-inet.proto``, ``fifo.proto``, ``remap-file-path.proto`` and
``file-lock.proto``.
"""

import ipaddress
import os
import re
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from phosd.engine.criu.file_worker import Inode
from phosd.engine.criu.image_file import ImageFile, fields, strange
from phosd.engine.image.cpu_manifest import Connection
from phosd.engine.system import procfs, sockets, tcp
from phosd.engine.system.looking import describe

_ID, _FILE_REGULAR, _FILE_INTERNET, _FILE_UNIX, _FILE_FIFO, _FILE_TUN = 2, 3, 4, 16, 17, 11
_REGULAR_NAME, _UNIX_NAME, _FIFO_PATH = 6, 11, 3
_UNIX_FLAGS = 6
OUTSIDE = 1 | 8
"""CRIU's flags of a socket that is another program's, or inherited."""
LOCKS = "filelocks.img"
_REMAPPED, _REMAP_KIND, _LINKED, _GHOST = 1, 3, 0, 1
_PROTOCOL, _STATE, _PORT, _ADDRESS = 5, 6, 7, 11
_LOCK_TYPE, _LOCK_PID, _LOCK_DESCRIPTOR = 2, 3, 4
_IDS_FILES, _DESCRIPTOR_FILE, _DESCRIPTOR_NUMBER = 2, 1, 4
_READ_LOCK = 0
"""``F_RDLCK``, also of ``flock``, as CRIU writes it."""
_BOUND = (tcp.State.LISTENING, tcp.State.CLOSED)
"""States of a TCP socket that CRIU binds; it makes connected ones in other ways, or not at all."""
_LOCK = re.compile(r"\d+: (\w+) +\w+ +(READ|WRITE|UNLCK|RW|NONE) +(-?\d+) (\w+):(\w+):(\d+) ")
_HELD = procfs.PROC / "locks"

DRIVERS_SOCKET = re.compile(
    rb"\0(?:phos-softgpu-\d{1,10}-(?P<software>[0-9a-f]{16})"
    rb"|cuda-uvmfd-(?P<cuda>\d{1,20})-\d{1,10}\0*)"
)
"""The name of a socket that the GPU's driver has in each process, with the part that may be another
one. The software GPU follows its socket to any name. NVIDIA's driver has the inode of the pid
namespace there, and the pid.
"""

_Message = Mapping[int, Sequence[int | bytes]]


class Lock(NamedTuple):
    """A lock on a file; others may have it, too, if it is ``shared``."""

    path: str
    shared: bool


class Names:
    """What the images in ``folder`` have. Raises :class:`~phosd.errors.Internal` if they are not
    CRIU's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = list(_messages(folder / "files.img"))
        self._paths = {
            _number(entry, 1): os.fsdecode(_text(entry, _REGULAR_NAME))
            for entry in self._of(_FILE_REGULAR)
        }

    @cached_property
    def pipes(self) -> frozenset[int]:
        """The numbers of the files that are named pipes."""
        return frozenset(_number(each, _FIFO_PATH) for each in self._of(_FILE_FIFO))

    @cached_property
    def deleted(self) -> frozenset[int]:
        """The numbers of the files that were deleted, whose bytes are in the images."""
        return frozenset(self._remapped(_GHOST))

    def linked(self) -> list[str]:
        """Return the paths of deleted files of which there is a link that a restore removes."""
        return [self._paths.get(number, "") for number in self._remapped(_LINKED)]

    def _remapped(self, kind: int) -> Iterator[int]:
        path = self._folder / "remap-fpath.img"
        for each in _messages(path) if path.exists() else ():
            if _number(each, _REMAP_KIND) == kind:
                yield _number(each, _REMAPPED)

    def _of(self, number: int) -> Iterator[_Message]:
        """Yield the entries of one kind of files."""
        for each in self._files:
            for entry in each.get(number, ()):
                if isinstance(entry, bytes):
                    yield _read(entry)

    def taken(self, connections: Iterable[Connection]) -> Iterator[str]:
        """Yield what others have now, in words; ``connections`` are those within the tree."""
        yield from self._unix_names()
        yield from self._addresses()
        yield from _connected(connections)
        for number in sorted(self.pipes & self._paths.keys()):
            yield f"the named pipe {self._paths[number]}, from which each would read a part"
        for path in self.linked():
            yield f"what was saved of {path}, which was deleted"
        if any(True for _ in self._of(_FILE_TUN)):
            yield "a network device (TUN)"

    def _unix_names(self) -> Iterator[str]:
        bound = (each for each in self._of(_FILE_UNIX) if not _number(each, _UNIX_FLAGS) & OUTSIDE)
        wanted = {_text(each, _UNIX_NAME) for each in bound} - {b""}
        shown = {
            os.fsdecode(name.rstrip(b"\0").replace(b"\0", b"@"))
            for name in wanted
            if not DRIVERS_SOCKET.fullmatch(name)
        }
        there = {each.name for each in sockets.unix_sockets().values()} if shown else set()
        for name in sorted(shown & there):
            yield f"the unix socket {name}"

    def _addresses(self) -> Iterator[str]:
        here = os.getpid()
        there = {
            socket.IPPROTO_TCP: [s for s in tcp.tcp_sockets(here) if s.state != tcp.State.ENDED],
            socket.IPPROTO_UDP: tcp.udp_sockets(here),
        }
        for each in self._of(_FILE_INTERNET):
            protocol, port = _number(each, _PROTOCOL), _number(each, _PORT)
            if protocol == socket.IPPROTO_TCP and _number(each, _STATE) not in _BOUND:
                continue
            address = _address(each)
            if port and any(
                other.here[1] == port and _overlap(other.here[0], address)
                for other in there.get(protocol, ())
            ):
                kind = "TCP" if protocol == socket.IPPROTO_TCP else "UDP"
                yield f"the {kind} port {port} of {address}"

    def locks(self) -> Iterator[Lock]:
        """Yield the locks that the tree has."""
        path = self._folder / LOCKS
        for each in _messages(path) if path.exists() else ():
            name = self._path_of(_number(each, _LOCK_PID), _number(each, _LOCK_DESCRIPTOR))
            if name:
                yield Lock(name, _number(each, _LOCK_TYPE) == _READ_LOCK)

    def _path_of(self, pid: int, descriptor: int) -> str:
        ids = next(_messages(self._folder / f"ids-{pid}.img"), {})
        for each in _messages(self._folder / f"fdinfo-{_number(ids, _IDS_FILES)}.img"):
            if _number(each, _DESCRIPTOR_NUMBER) == descriptor:
                return self._paths.get(_number(each, _DESCRIPTOR_FILE), "")
        return ""


def locked(wanted: Iterable[Lock], inodes: Iterable[Inode]) -> Iterator[str]:
    """Yield which of the locks others have now, and who. ``inodes`` are the files' now."""
    files = {inode.path: inode for inode in inodes}
    there = _held() if files else {}
    for lock in wanted:
        inode = files.get(lock.path)
        for holder, exclusive, device in there.get(inode.number, ()) if inode else ():
            known = inode is not None and (device == inode.device or _has_open(holder, inode))
            if known and (exclusive or not lock.shared):
                whose = f", which {describe(holder)} has" if holder > 0 else ""
                yield f"a lock on {lock.path}{whose}"
                break


def _held() -> dict[int, list[tuple[int, bool, int]]]:
    """Return the holders of locks by the number of the file's inode: the pid, whether it is
    exclusive, and the device.
    """
    found: defaultdict[int, list[tuple[int, bool, int]]] = defaultdict(list)
    for line in _HELD.read_text().splitlines():
        if match := _LOCK.match(line):
            _, kind, pid, major, minor, number = match.groups()
            device = os.makedev(int(major, 16), int(minor, 16))
            found[int(number)].append((int(pid), kind != "READ", device))
    return found


def _has_open(pid: int, inode: Inode) -> bool:
    """Return whether a process has the file open: some file systems tell another device."""
    try:
        opened = [each.file for each in procfs.descriptors(pid, without=OSError)]
    except OSError:  # it has ended, or is none of this namespace's
        return False
    return any((each.st_dev, each.st_ino) == (inode.device, inode.number) for each in opened)


def _connected(connections: Iterable[Connection]) -> Iterator[str]:
    ends = {
        tcp.place(str(end.address[0]), int(end.address[1]))
        for connection in connections
        for end in connection.ends
    }
    if not ends:
        return
    living = (s for s in tcp.tcp_sockets(os.getpid()) if s.state != tcp.State.ENDED)
    for host, port in sorted({each.here for each in living} & ends):
        yield f"the end {host}:{port} of a TCP connection"


def _address(entry: _Message) -> str:
    words = [each for each in entry.get(_ADDRESS, ()) if isinstance(each, int)]
    packed = struct.pack(f"={len(words)}I", *(word & 0xFFFFFFFF for word in words))
    family = {4: socket.AF_INET, 16: socket.AF_INET6}.get(len(packed))
    return tcp.place(socket.inet_ntop(family, packed), 0)[0] if family else "::"


def _overlap(one: str, other: str) -> bool:
    return one == other or any(ipaddress.ip_address(each).is_unspecified for each in (one, other))


def _messages(path: Path) -> Iterator[_Message]:
    try:
        for each in ImageFile.read(path).messages:
            yield _read(each)
    except ValueError as error:
        raise strange(path) from error


def _read(message: bytes) -> _Message:
    found: defaultdict[int, list[int | bytes]] = defaultdict(list)
    for field in fields(message):
        found[field.number].append(field.value)
    return found


def _number(entry: _Message, number: int) -> int:
    return next((each for each in entry.get(number, ()) if isinstance(each, int)), 0)


def _text(entry: _Message, number: int) -> bytes:
    return next((each for each in entry.get(number, ()) if isinstance(each, bytes)), b"")
