"""Lay out the messages between phosd and the hook: their numbers, and how their fields are packed.

``phosd/hook/protocol/wire.h`` is the other side, with the same names for all layouts.
"""

import enum
import struct
from typing import get_args

from phosd.interface.options import Then

MAGIC = 0x534F4850
VERSION = 1
REPLY = 0x8000
MAX_PAYLOAD = 1 << 16
MAX_DESCRIPTORS = 128
ANALYSED, GUESSED = 0x100, 0x200
"""Flags of launches; see wire.h."""

HEADER = struct.Struct("<IHHIIII")
HELLO = struct.Struct("<8I256s")
DEVICE_ID = struct.Struct("<16s")
BLOCK = struct.Struct("<QQQiI")
BLOCK_LIST = struct.Struct("<IIQQ")
CLOSE_GATE = struct.Struct("<III")
GATE_STATE = struct.Struct("<IIIIQQQ")
ARM = struct.Struct("<II")
ROW_LIST = struct.Struct("<II")
"""Before the rows of a list: how many there are, and whether there are more."""
KERNEL = struct.Struct("<QQII")
LAUNCHES_ASK = struct.Struct("<QII")
LAUNCHED_KERNEL = struct.Struct("<QQQQIIII")
IMAGE = struct.Struct("<QQQII")
EMPTY_CACHE = struct.Struct("<II")
RELEASE_STATE = struct.Struct("<II256s")
PROGRAM_ASK = struct.Struct("<IiIIQ256s")
PROGRAM_STATE = struct.Struct("<IIIIQ256s")
PROGRAM_WISH = struct.Struct("<QII")
MAX_NAME = 4096
MAX_KERNELS = 1 << 16
"""Most kernels accepted from one program."""
MAX_BLOCKS = 1 << 20
"""Most blocks accepted from one program; as many of 2 MiB would fill 2 TiB."""
MAX_EXPORTED = 1 << 17
"""Most blocks that one program may hand out; phosd keeps a descriptor of each. PyTorch makes some
4,200 of a GPU of 141 GB.
"""
U64 = struct.Struct("<Q")
"""A cursor or a count."""


class Type(enum.IntEnum):
    """Requests; see wire.h."""

    HELLO = 1
    LIST_BLOCKS = 2
    EXPORT_BLOCKS = 3
    CLOSE_GATE = 4
    PARK = 5
    UNPARK_BLOCKS = 6
    UNPARK = 7
    OPEN_GATE = 8
    REHOME = 9
    DETACH = 10
    STATS = 11
    ARM = 12
    DISARM = 13
    FORGET = 14
    KERNELS = 15
    EMPTY_CACHE = 16
    MAY_SEE = 17
    SEAL_GATE = 18
    PROGRAM = 19
    IMAGES = 20
    SUMMARIES = 21
    LAUNCHES = 22
    MAKE_BLOCKS = 23
    BLOCKS_FILLED = 24
    BLOCKS_RENEWED = 25
    UNFINISHED = 26


class Status(enum.IntEnum):
    """Results of a request; see wire.h."""

    OK = 0
    BAD_MESSAGE = 1
    WRONG_STATE = 2
    UNSUPPORTED = 3
    BUSY = 4
    DRIVER = 5
    OUT_OF_MEMORY = 6
    NOT_IMPORTABLE = 7


class HookState(enum.IntEnum):
    """States of the gate; see wire.h."""

    RUNNING = 0
    CLOSING = 1
    CLOSED = 2
    PARKED = 3


class Release(enum.IntEnum):
    """Results of emptying PyTorch's cache; see wire.h."""

    NONE = 0
    ASKED = 1
    RELEASED = 2
    NO_INTERPRETER = 3
    NO_TORCH = 4
    CAPTURING = 5
    FAILED = 6


class Ask(enum.IntEnum):
    """What is asked with ``PROGRAM``; see wire.h."""

    LOOK = 0
    WANT = 1
    ANSWER = 2
    PASS = 3


class ProgramOutcome(enum.IntEnum):
    """Outcomes of a program's wait; see phosd/include/phos.h."""

    FAILED = -1
    NOTHING = 0
    SAVED = 1
    RESTORED = 2
    STOPPED = 3
    WAITING = 4


THENS: tuple[Then, ...] = get_args(Then)
"""What becomes of the program, by the number in phosd/include/phos.h."""


class BlockFlag(enum.IntFlag):
    """Properties of a block; see wire.h."""

    HAS_DESCRIPTOR = 1
    EXPORTED = 2
    IMPORTED = 4
    PROGRAM_VMM = 8
    HOST_LOCATED = 16
    AWAY = 32
