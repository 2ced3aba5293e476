"""One field of CRIU's ``core-<pid>.img``: the signal a process gets when its parent ends.

The file is two magic numbers, then a length and a message in the protobuf wire format. The field
is ``core_entry.thread_core.pdeath_sig`` of CRIU's ``core.proto``.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from phosd.errors import Internal

_LIMIT = 1 << 20
_THREAD_CORE = 5
_PARENT_DEATH_SIGNAL = 8


def parent_death_signal(path: Path) -> int:
    """The signal's number, or 0. Raises :class:`Internal` if the file is not understood."""
    data = path.read_bytes()[:_LIMIT]
    try:
        (length,) = struct.unpack_from("<I", data, 8)
        for field, value in _fields(data[12 : 12 + length]):
            if field == _THREAD_CORE and isinstance(value, bytes):
                for inner, number in _fields(value):
                    if inner == _PARENT_DEATH_SIGNAL and isinstance(number, int):
                        return number
    except (struct.error, IndexError, ValueError) as error:
        raise Internal(f"{path.name} is not an image of CRIU 4", hint="report this") from error
    return 0


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
                yield tag >> 3, value
            case 1:
                at += 8
            case 2:
                length, at = _varint(message, at)
                yield tag >> 3, message[at : at + length]
                at += length
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
