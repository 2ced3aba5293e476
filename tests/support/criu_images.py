"""Change single fields of CRIU's image files, at the level of the protobuf wire format.

A file is one or two magic numbers, then messages, each after its length of four bytes. Fields
have no names here: a message within a message is recognised by being one.
"""

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_COMMON = (0x54564319, 0x55105940)
"""Magic numbers that another one follows."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: "<Q", _FIXED32: "<I"}
_NUMBERS = (0, 1, 2, 3, 7, 255, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 63)
_LARGEST = (1 << 64) - 1


class _NoMessageError(Exception):
    """The bytes are no message."""


@dataclass
class Field:
    """A field of a message: ``value`` is a number, bytes, or the fields of a message."""

    number: int
    kind: int
    value: "int | bytes | list[Field]"


@dataclass
class ImageFile:
    """One of CRIU's files; what follows its messages is kept as it is."""

    magic: bytes
    messages: list[list[Field]]
    rest: bytes = b""
    leaves: list[tuple[list[Field], Field]] = field(default_factory=list)
    """All fields that are no messages, with the message that each is in."""

    @classmethod
    def read(cls, path: Path) -> "ImageFile":
        """Read a file."""
        data = path.read_bytes()
        at = 8 if int.from_bytes(data[:4], "little") in _COMMON else 4
        found = cls(data[:at], [])
        while at + 4 <= len(data):
            (size,) = struct.unpack_from("<I", data, at)
            if at + 4 + size > len(data):
                break
            try:
                message = _parse(data[at + 4 : at + 4 + size])
            except _NoMessageError:
                break
            found.messages.append(message)
            at += 4 + size
        found.rest = data[at:]
        for message in found.messages:
            found.leaves.extend(_leaves(message))
        return found

    def write(self, path: Path) -> None:
        """Write the file anew."""
        whole = [self.magic]
        for message in self.messages:
            body = _written(message)
            whole.append(struct.pack("<I", len(body)) + body)
        path.write_bytes(b"".join(whole) + self.rest)


def mutate(image: ImageFile, chance: random.Random, texts: Sequence[str]) -> str:
    """Change, remove or repeat one field. Returns what was done; ``texts`` may replace names."""
    message, chosen = chance.choice(image.leaves)
    match chance.randrange(8):
        case 0:
            message.remove(chosen)
            return f"field {chosen.number} removed"
        case 1:
            message.append(chosen)
            return f"field {chosen.number} repeated"
    before = chosen.value
    if isinstance(before, int):
        near = [before + 1, before - 1, before ^ 1 << chance.randrange(64), chance.getrandbits(64)]
        chosen.value = chance.choice([*_NUMBERS, *near]) & _LARGEST
    else:
        assert isinstance(before, bytes)
        chosen.value = _other_bytes(before, chance, texts)
    return f"field {chosen.number}: {before!r} -> {chosen.value!r}"


def _other_bytes(before: bytes, chance: random.Random, texts: Sequence[str]) -> bytes:
    if chance.random() < 0.7 and _is_text(before):
        text = chance.choice(texts).encode()
        return text + b"\0" * before.endswith(b"\0")
    after = bytearray(before or b"\0")
    for _ in range(chance.randint(1, 4)):
        after[chance.randrange(len(after))] = chance.randrange(256)
    return bytes(after) * chance.choice((1, 1, 1, 2)) if chance.random() < 0.8 else b""


def _is_text(data: bytes) -> bool:
    return bool(data) and data.rstrip(b"\0").isascii() and b"\0" not in data[:-1]


def _parse(data: bytes) -> list[Field]:
    fields = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise _NoMessageError
        value: int | bytes | list[Field]
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind in _FIXED:
            size = struct.calcsize(_FIXED[kind])
            if at + size > len(data):
                raise _NoMessageError
            (value,) = struct.unpack_from(_FIXED[kind], data, at)
            at += size
        elif kind == _BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise _NoMessageError
            value = _inner(data[at : at + size])
            at += size
        else:
            raise _NoMessageError
        fields.append(Field(number, kind, value))
    return fields


def _inner(data: bytes) -> bytes | list[Field]:
    """Return the fields of a message, or bytes that are none or a text."""
    if not data or (_is_text(data) and all(32 <= byte < 127 for byte in data.rstrip(b"\0"))):
        return data
    try:
        return _parse(data)
    except _NoMessageError:
        return data


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise _NoMessageError
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value & _LARGEST, at
        shift += 7
    raise _NoMessageError


def _written(fields: Sequence[Field]) -> bytes:
    whole = bytearray()
    for each in fields:
        whole += _varint_bytes(each.number << 3 | each.kind)
        if isinstance(each.value, int):
            if each.kind == _VARINT:
                whole += _varint_bytes(each.value)
            else:
                size = struct.calcsize(_FIXED[each.kind])
                whole += each.value.to_bytes(8, "little")[:size]
            continue
        body = each.value if isinstance(each.value, bytes) else _written(each.value)
        whole += _varint_bytes(len(body)) + body
    return bytes(whole)


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _leaves(message: list[Field]) -> Iterator[tuple[list[Field], Field]]:
    for each in message:
        if isinstance(each.value, list):
            yield from _leaves(each.value)
        else:
            yield message, each
