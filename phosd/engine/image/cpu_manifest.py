"""Define what a manifest records of the CPU side of a tree, beyond CRIU's own files."""

import os
from enum import StrEnum

import msgspec

WRITTEN = "written"
"""The folder of a tree's with the saved bytes of :class:`WrittenFile`."""


class OpenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A regular file that a process had open when it was frozen.

    ``flags`` are those of ``open``; ``size`` in bytes; ``content`` is the SHA-256 of the whole
    file, if the file is written but not appended to, and was small enough to hash. ``mode`` has the
    permission bits, which CRIU wants again.
    """

    pid: int
    descriptor: int
    path: str
    flags: int
    size: int
    mtime_ns: int
    content: str | None = None
    mode: int = 0o600

    @property
    def appended(self) -> bool:
        """Whether it is only appended to: it may have grown, and CRIU restores it as it is."""
        return self.write_only and bool(self.flags & os.O_APPEND)

    @property
    def write_only(self) -> bool:
        return self.flags & os.O_ACCMODE == os.O_WRONLY


class MemoryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named file in memory (tmpfs) that is mapped shared, and where its bytes are saved.

    ``saved`` is relative to the tree's folder; ``mode`` has the permission bits.
    """

    path: str
    saved: str
    size: int
    mode: int


class WrittenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file on a disk that the tree might write to, and where its bytes of the stop are saved.

    ``saved`` is relative to the tree's folder; ``mode`` has the permission bits. ``inode``: a
    program may have noted which file it is, as sqlite does. ``mapped``: shared and writable, so
    that its times do not tell when it was written. ``declared``: the program did not have it open,
    and was started with it as its own; its inode, which is 0, does not matter. ``attributes`` are
    extended ones, in hexadecimal.
    """

    path: str
    saved: str
    size: int
    mode: int
    gid: int
    inode: int
    mtime_ns: int
    mapped: bool = False
    declared: bool = False
    attributes: dict[str, str] = {}


class DeclaredState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was, at the stop, in the places that a program was started with as its own.

    ``patterns`` are folders, files and patterns; ``files`` the paths of what was there, ``folders``
    with their modes, and ``links`` with what they pointed to.
    """

    patterns: tuple[str, ...]
    files: tuple[str, ...]
    folders: dict[str, int]
    links: dict[str, str]


class MappedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program or library file that is mapped; ``size`` in bytes.

    ``build_id`` in hex, of an image that was made on another machine; in others it is only in
    CRIU's files, and CRIU checks it.
    """

    path: str
    size: int
    build_id: str = ""


class EndpointKind(StrEnum):
    """The kind of one end of a connection that leads out of the tree."""

    PIPE = "pipe"
    TERMINAL = "terminal"
    SOCKET = "socket"


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A standard output that leads out of the tree. ``key`` is CRIU's name for it."""

    kind: EndpointKind
    key: str
    pid: int
    descriptor: int


class SocketOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A socket's option, by level and number (``setsockopt(2)``), and its value in hexadecimal."""

    level: int
    number: int
    value: str


class ConnectionEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An end of a TCP connection. ``inode`` is 0 if no process had it open any more.

    ``family`` and ``address`` are those of Python's ``socket``; ``flags`` those of ``open``.
    ``unread`` counts the bytes that had arrived, which are saved. ``finished`` and ``deaf`` say
    whether it was shut down for writing and for reading.
    """

    inode: int
    family: int
    address: tuple[str | int, ...]
    flags: int = 0
    unread: int = 0
    finished: bool = False
    deaf: bool = False
    options: tuple[SocketOption, ...] = ()


class Connection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A TCP connection within the tree. ``ends`` are two."""

    ends: tuple[ConnectionEnd, ConnectionEnd]


class Cgroups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the root of a tree was, by hierarchy, and what was limited there.

    The names are those of ``system/cgroups.py``. ``invocation`` is that of systemd's unit, and
    after a colon that of Slurm's step, whose names others may have by now; empty: there are none,
    or not known, as in older images.
    """

    paths: dict[str, str]
    limits: dict[str, str]
    invocation: str = ""


class CpuDetails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a restore of the tree needs to know besides CRIU's files.

    ``privileged`` says why only root may restore it; empty if its owner may. ``tied_to_parent`` is
    the parent-death signal of the root (``PR_SET_PDEATHSIG``), or 0. ``devices`` are paths of the
    GPU driver's devices, which restore opens anew, and ``device_memory`` names of exported memory
    that the tree has open (``memory_handles.py``). ``imported``: the image was
    made on another machine; files that were only appended to are made anew where they are missing.
    ``loginuid`` is the audit identity of the root; None if the kernel had no audit, or the image is
    older, or imported.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    privileged: str
    tcp: str
    shell_job: bool
    tied_to_parent: int
    endpoints: tuple[Endpoint, ...] = ()
    open_files: tuple[OpenFile, ...] = ()
    memory_files: tuple[MemoryFile, ...] = ()
    written_files: tuple[WrittenFile, ...] = ()
    declared: DeclaredState | None = None
    mapped_files: tuple[MappedFile, ...] = ()
    cgroups: Cgroups | None = None
    connections: tuple[Connection, ...] = ()
    devices: tuple[str, ...] = ()
    device_memory: tuple[str, ...] = ()
    imported: bool = False
    loginuid: int | None = None
