"""Tell builds of programs and libraries apart, as CRIU does: by the build-id in the file.

CRIU notes the ids in its images (``regfile.proto``), and compares them at a restore. An image that
goes to another machine names them in its manifest, so that what is another build there is known
before the image is sent. A file that no build-id was noted of is compared by its size alone.
"""

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from phosd.engine.criu.images.fields import FileEntry, RegFileEntry
from phosd.engine.criu.images.image_file import Field, ImageFile, fields, strange

_WORD = struct.Struct("<I")
_READ = 1 << 20
"""Bytes of a file in which CRIU looks for the id."""
_ELF_64 = b"\x7fELF\x02"
_TABLE_AT, _TABLE_SIZES = 32, 54
_SEGMENT = struct.Struct("<IIQQQQQQ")
_NOTE = struct.Struct("<III")
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3


def noted(folder: Path) -> dict[str, str]:
    """Return the build-ids, in hex, that CRIU's images in ``folder`` have, by path.

    Raises :class:`~phosd.errors.Internal` for images that are not CRIU's.
    """
    path, found = folder / "files.img", {}
    try:
        for message in ImageFile.read(path).messages:
            for field in fields(message):
                if field.number == FileEntry.REG and isinstance(field.value, bytes):
                    name, build_id = _entry(fields(field.value))
                    if build_id:
                        found[name] = build_id
    except (ValueError, struct.error) as error:
        raise strange(path) from error
    return found


def _entry(entry: Iterable[Field]) -> tuple[str, str]:
    name, words = "", b""
    for field in entry:
        if field.number == RegFileEntry.NAME and isinstance(field.value, bytes):
            name = os.fsdecode(field.value)
        elif field.number == RegFileEntry.BUILD_ID and isinstance(field.value, int):
            words += _WORD.pack(field.value)
    return name, words.hex()


def build_id(descriptor: int) -> str:
    """Return the build-id of an open file in hex, as CRIU notes it: in words of four bytes.

    Empty if there is none in its first MiB.
    """
    data = os.pread(descriptor, _READ, 0)
    if not data.startswith(_ELF_64):
        return ""
    try:
        (table,) = struct.unpack_from("<Q", data, _TABLE_AT)
        size, count = struct.unpack_from("<HH", data, _TABLE_SIZES)
        for index in range(count):
            kind, _, at, _, _, length, *_ = _SEGMENT.unpack_from(data, table + index * size)
            if kind == _PT_NOTE and (found := _in_notes(data[at : at + length])):
                return found.ljust(_whole(len(found)), b"\0").hex()
    except struct.error:  # it goes on behind what was read, or is none
        return ""
    return ""


def _in_notes(notes: bytes) -> bytes:
    at = 0
    while at + _NOTE.size <= len(notes):
        name, length, kind = _NOTE.unpack_from(notes, at)
        content = at + _NOTE.size + _whole(name)
        if kind == _NT_GNU_BUILD_ID and notes[at + _NOTE.size :].startswith(b"GNU\0"):
            return notes[content : content + length]
        at = content + _whole(length)
    return b""


def _whole(length: int) -> int:
    """Return the bytes of whole words."""
    return -(-length // _WORD.size) * _WORD.size
