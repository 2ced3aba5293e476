"""The numbers of the fields in CRIU's images, by CRIU's names.

A class has the name of a message, or of an enumeration, in CRIU's ``images/*.proto``: ``FileEntry``
is ``file_entry``. It has those fields that are read or written here. They never change their
numbers: older images would not be read any more. ``tests/node/criu/test_fields.py`` compares them
with CRIU's own source.
"""

from enum import IntEnum


class FdTypes(IntEnum):
    """``fdinfo.proto``, the values of an enumeration."""

    REG = 1
    INETSK = 4
    UNIXSK = 5
    EVENTFD = 6
    EXT = 16
    MEMFD = 18


class FdinfoEntry(IntEnum):
    """``fdinfo.proto``."""

    ID = 1
    TYPE = 3
    FD = 4


class FileEntry(IntEnum):
    """``fdinfo.proto``."""

    TYPE = 1
    ID = 2
    REG = 3
    ISK = 4
    EFD = 8
    TUNF = 11
    EXT = 15
    USK = 16
    FIFO = 17
    MEMFD = 20


class RegFileEntry(IntEnum):
    """``regfile.proto``."""

    ID = 1
    FLAGS = 2
    POS = 3
    FOWN = 5
    NAME = 6
    SIZE = 8
    MODE = 10
    BUILD_ID = 11


class InetSkEntry(IntEnum):
    """``sk-inet.proto``."""

    INO = 2
    PROTO = 5
    STATE = 6
    SRC_PORT = 7
    DST_PORT = 8
    FLAGS = 9
    SRC_ADDR = 11
    FOWN = 13
    OPTS = 14


class UnixSkEntry(IntEnum):
    """``sk-unix.proto``."""

    ID = 1
    UFLAGS = 6
    NAME = 11
    FILE_PERMS = 13
    NAME_DIR = 14
    DELETED = 15


class EventfdFileEntry(IntEnum):
    """``eventfd.proto``."""

    ID = 1
    FLAGS = 2
    FOWN = 3
    COUNTER = 4


class MemfdFileEntry(IntEnum):
    """``memfd.proto``."""

    FOWN = 4


class ExtFileEntry(IntEnum):
    """``ext-file.proto``."""

    FOWN = 5


class VmaEntry(IntEnum):
    """``vma.proto``."""

    START = 1
    END = 2
    PGOFF = 3
    SHMID = 4
    PROT = 5
    FLAGS = 6
    STATUS = 7
    FD = 8


class MmEntry(IntEnum):
    """``mm.proto``."""

    VMAS = 14
    AIOS = 16


class PagemapHead(IntEnum):
    """``pagemap.proto``."""

    PAGES_ID = 1


class PagemapEntry(IntEnum):
    """``pagemap.proto``."""

    VADDR = 1
    COMPAT_NR_PAGES = 2
    IN_PARENT = 3
    FLAGS = 4
    NR_PAGES = 5


class PstreeEntry(IntEnum):
    """``pstree.proto``."""

    PID = 1
    PPID = 2
    THREADS = 5


class TaskKobjIdsEntry(IntEnum):
    """``core.proto``."""

    FILES_ID = 2


class ThreadCoreEntry(IntEnum):
    """``core.proto``."""

    PDEATH_SIG = 8
    CREDS = 10
    SECCOMP_MODE = 11
    RSEQ_ENTRY = 15


class CoreEntry(IntEnum):
    """``core.proto``."""

    THREAD_CORE = 5


class CredsEntry(IntEnum):
    """``creds.proto``."""

    UID = 1
    GID = 2
    EUID = 3
    EGID = 4
    SUID = 5
    SGID = 6
    FSUID = 7
    FSGID = 8
    CAP_INH = 9
    CAP_PRM = 10
    CAP_EFF = 11
    CAP_BND = 12
    SECBITS = 13
    GROUPS = 14
    NO_NEW_PRIVS = 18
    CAP_AMB = 19


class RseqEntry(IntEnum):
    """``rseq.proto``."""

    RSEQ_ABI_POINTER = 1
    RSEQ_ABI_SIZE = 2


class RemapType(IntEnum):
    """``remap-file-path.proto``, the values of an enumeration."""

    LINKED = 0
    GHOST = 1


class RemapFilePathEntry(IntEnum):
    """``remap-file-path.proto``."""

    ORIG_ID = 1
    REMAP_ID = 2
    REMAP_TYPE = 3


class FileLockEntry(IntEnum):
    """``file-lock.proto``."""

    TYPE = 2
    PID = 3
    FD = 4


class FifoEntry(IntEnum):
    """``fifo.proto``."""

    REGF_ID = 3
