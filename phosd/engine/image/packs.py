"""Read and write packs, the files that hold chunks.

A pack is a sequence of records, each a 4,096-byte header and the chunk's bytes padded to 4,096, so
that direct I/O can write it and a scan can rebuild the index. The header, little-endian:

====== ===== ================================================================
offset bytes field
====== ===== ================================================================
0      8     magic ``PHOSPACK``
8      4     version, 1
12     4     CRC-32 of the bytes 16..96
16     8     length of the chunk in bytes
24     16    digest of the chunk
40     8     user id of the owner
48     48    id of the image, padded with zeros
====== ===== ================================================================

The rest of the header is zero. A pack belongs to one image's job, and so to one owner.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phosd.engine.image.manifest import CHUNK
from phosd.errors import ImageCorrupt

PAGE = 4096
HEADER = PAGE
CAPACITY = 1 << 30
"""Bytes after which a pack is full."""
MAGIC = b"PHOSPACK"
VERSION = 1
RECORD = HEADER + CHUNK
"""Bytes of the record of a whole chunk."""

_LANES = 16
_LANE_CHUNKS = 64
"""The number of packs filled in parallel; fewer if each would get fewer than ``_LANE_CHUNKS``."""

_FRONT = struct.Struct("<8sII")
_BODY = struct.Struct("<Q16sQ48s")
FIELDS = _FRONT.size + _BODY.size
"""Bytes of a header that carry fields; the rest is zero."""


@dataclass(frozen=True)
class Record:
    """A record's header: ``offset`` in its pack, ``length`` of its chunk in bytes, names."""

    offset: int
    length: int
    digest: bytes
    owner: int
    image: str

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.offset + record_size(self.length)


def record_size(length: int) -> int:
    """Return the bytes that a chunk of ``length`` bytes takes in a pack."""
    return HEADER + -(-length // PAGE) * PAGE


def pack_count(chunk_count: int) -> int:
    """Return the number of packs to fill in parallel: a file takes one writer at a time."""
    enough = -(-chunk_count // (CAPACITY // RECORD))
    return max(enough, min(_LANES, -(-chunk_count // _LANE_CHUNKS)))


def header_fields(image: str, owner: int, digest: bytes, length: int) -> bytes:
    """Return the :data:`FIELDS` bytes at the start of a record."""
    body = _BODY.pack(length, digest, owner, image.encode())
    return _FRONT.pack(MAGIC, VERSION, zlib.crc32(body)) + body


def parse_header(data: "bytes | bytearray | memoryview", offset: int, where: str) -> Record:
    """Parse the header ``data`` of a record. Raises :class:`ImageCorrupt`, naming ``where``."""
    if len(data) < HEADER:
        raise _bad(where, offset, "ends inside its header")
    magic, version, crc = _FRONT.unpack_from(data)
    body = bytes(data[_FRONT.size : FIELDS])
    if magic != MAGIC:
        raise _bad(where, offset, "has no header")
    if version != VERSION:
        raise _bad(where, offset, f"is of format {version}, this phosd reads {VERSION}")
    if zlib.crc32(body) != crc or any(data[FIELDS:HEADER]):
        raise _bad(where, offset, "has a damaged header")
    length, digest, owner, image = _BODY.unpack(body)
    if not 0 < length <= CHUNK:
        raise _bad(where, offset, f"claims {length} bytes")
    return Record(offset, length, digest, owner, image.rstrip(b"\0").decode(errors="replace"))


def read_record(fd: int, offset: int, buffer: Any, where: str) -> Record:
    """Read the record at ``offset`` into ``buffer`` (:data:`RECORD` bytes or more, writable).

    Its chunk is then ``buffer[HEADER : HEADER + record.length]``. The chunk is not hashed here.
    """
    view = memoryview(buffer)[:RECORD]
    count = _pread_all(fd, view, offset)
    record = parse_header(view[:count], offset, where)
    if count < record_size(record.length):
        raise _bad(where, offset, "is cut short")
    return record


def scan(fd: int, where: str) -> Iterator[Record]:
    """Yield every record of a pack in order, from its headers alone, as an index is rebuilt.

    Raises :class:`ImageCorrupt` at the first record that is damaged or cut short.
    """
    size = os.fstat(fd).st_size
    offset = 0
    while offset < size:
        record = parse_header(os.pread(fd, HEADER, offset), offset, where)
        if record.end > size:
            raise _bad(where, offset, "is cut short")
        yield record
        offset = record.end


def _pread_all(fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view) and (count := os.preadv(fd, [view[done:]], offset + done)):
        done += count
    return done


def _bad(where: str, offset: int, what: str) -> ImageCorrupt:
    return ImageCorrupt(
        f"the record at {offset} of {where} {what}", hint="the image cannot be restored; delete it"
    )
