"""Read and write CRIU's image files: messages in the protobuf wire format.

A file is two magic numbers, then messages, each after its length of four bytes. The fields of a
message have numbers, which CRIU's ``.proto`` files name.
"""

import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from phosd.errors import Internal

_MAGIC_BYTES = 8
_LENGTH = struct.Struct("<I")
_LIMIT = 16 << 20
"""Most bytes of a file: CRIU may have written it with the rights of the program's user."""
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
"""Sizes of the wire types whose values are not looked at."""
_WORD = (1 << 64) - 1


class Field(NamedTuple):
    """A field of a message: an unsigned number, or the bytes of a string or a message.

    ``wire_type`` tells them apart from numbers of fixed size, which are kept as bytes.
    """

    number: int
    wire_type: int
    value: int | bytes

    @classmethod
    def of(cls, number: int, value: int | bytes) -> Self:
        """Return a field with this value; a negative number as CRIU's ``int64`` has it."""
        if isinstance(value, bytes):
            return cls(number, _BYTES, value)
        return cls(number, _VARINT, value & _WORD)


Change = Callable[[list[Field]], Iterable[Field]]
"""What makes the fields of a message other ones."""


@dataclass(frozen=True)
class ImageFile:
    """A CRIU file: its magic numbers, and its messages."""

    magic: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def read(cls, path: Path, limit: int = _LIMIT) -> Self:
        """Read a file. Raises :class:`Internal` if it is none, or over ``limit`` bytes."""
        data = _bytes(path, limit)
        messages, at = [], _MAGIC_BYTES
        while at < len(data):
            if at + _LENGTH.size > len(data):
                raise strange(path)
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            if at + length > len(data):
                raise strange(path)
            messages.append(data[at : at + length])
            at += length
        if len(data) < _MAGIC_BYTES:
            raise strange(path)
        return cls(data[:_MAGIC_BYTES], tuple(messages))

    def write(self, path: Path) -> None:
        """Put the file in the place of the one at ``path``, whose mode it gets."""
        draft = path.with_name(path.name + ".new")
        mode = stat.S_IMODE(path.lstat().st_mode)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.magic)
            for message in self.messages:
                file.write(_LENGTH.pack(len(message)) + message)
        draft.rename(path)


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message. Raises :class:`ValueError` if it is none."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, at = varint(message, at)
            yield Field(number, wire_type, value)
            continue
        if wire_type == _BYTES:
            length, at = varint(message, at)
        elif wire_type in _FIXED:
            length = _FIXED[wire_type]
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + length > len(message):
            raise ValueError("the message ends within a field")
        yield Field(number, wire_type, message[at : at + length])
        at += length


def entries(path: Path, number: int) -> Iterator[dict[int, int | bytes]]:
    """Yield the values, by number, of the messages that are field ``number`` of a file's messages.

    Raises :class:`Internal` if the file is not CRIU's.
    """
    try:
        for message in ImageFile.read(path).messages:
            for field in fields(message):
                if field.number == number and isinstance(field.value, bytes):
                    yield {each.number: each.value for each in fields(field.value)}
    except ValueError as error:
        raise strange(path) from error


def message(of: Iterable[Field]) -> bytes:
    """Return the message with these fields."""
    parts = bytearray()
    for field in of:
        parts += _encoded(field.number << 3 | field.wire_type)
        if isinstance(field.value, int):
            parts += _encoded(field.value)
            continue
        if field.wire_type == _BYTES:
            parts += _encoded(len(field.value))
        parts += field.value
    return bytes(parts)


def rewrite(path: Path, change: Change) -> None:
    """Change every message of a file; a file without changes is left as it is."""
    found = ImageFile.read(path)
    try:
        new = tuple(message(change([*fields(each)])) for each in found.messages)
    except ValueError as error:
        raise strange(path) from error
    if new != found.messages:
        ImageFile(found.magic, new).write(path)


def changed(field: Field, change: Change) -> Field:
    """Return a field that is a message with another content."""
    assert isinstance(field.value, bytes)
    return Field.of(field.number, message(change([*fields(field.value)])))


def with_bytes(
    number: int, change: Callable[[bytes], bytes], entry: Iterable[Field]
) -> Iterator[Field]:
    """Yield the fields of a message, of which those with this number have changed bytes."""
    for each in entry:
        if each.number == number and isinstance(each.value, bytes):
            yield Field.of(number, change(each.value))
        else:
            yield each


def strange(path: Path) -> Internal:
    """Return the error for a file that is not as CRIU writes it."""
    return Internal(f"{path.name} is not an image of CRIU 4", hint="report this")


def _bytes(path: Path, limit: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise strange(path) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise strange(path)
        return file.read(limit)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at``, and where it ends. Raises :class:`ValueError` if it does not."""
    value = shift = 0
    while True:
        if at == len(data) or shift > 63:
            raise ValueError("a number does not end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & _WORD, at


def _encoded(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
