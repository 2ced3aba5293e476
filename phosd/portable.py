"""Define how an image looks outside of a node: a head, and behind it chunks (portable-format.md).

A head is, little-endian::

    0   8  magic ``PHOSIMG`` and a zero
    8   4  format
    12  4  bytes of the signature, 0 if there is none
    16  8  bytes of the manifest
    24     the manifest, JSON, and the signature, as ``ssh-keygen -Y sign`` writes it

A file of ``phos export`` is a head and every chunk that the manifest lists, in that order. Between
phosd and its client the same goes over a socket. The receiver of a head answers with a map of the
chunks that it wants, a bit for each; once it has them all, and has made of them what it should, the
client says :data:`DONE`.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from phosd.errors import ImageCorrupt, Reason, Unsupported
from phosd.units import human_bytes

FORMAT = 1
SIGNED_FOR = "phosd-image"
"""The namespace of signatures (``ssh-keygen -n``): one that was given for other things is none."""
MAX_MANIFEST = 128 << 20
"""Largest size of a manifest in bytes; one for 8 GPUs with 141 GB each takes about 50 MB."""
MAX_SIGNATURE = 64 << 10
MAX_CHUNK = 2 << 20
ALIVE, DONE = b"\0", b"\1"
"""What the client of an export says: it is still at work, and it has stored all."""

MAGIC = b"PHOSIMG\0"
_PREFIX = struct.Struct("<8sIIQ")
FOREIGN = "name a file that `phos export` has written, or export it again"


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Up to 2 MiB of an image, named by their SHA-256 (hex); ``length`` in bytes."""

    sha256: str
    length: int


class Named(msgspec.Struct, frozen=True):
    """What the manifest says of its image for people; ``created`` is UTC in ISO 8601."""

    id: str
    name: str = ""
    created: str = ""


class Contents(msgspec.Struct, frozen=True):
    """What a client needs to know of a manifest: its chunks, and the names of the image."""

    chunks: tuple[Chunk, ...]
    image: Named

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True)
class Head:
    """The beginning of an image: its manifest, and a signature of that, if there is one."""

    manifest: bytes
    signature: bytes = b""

    @property
    def packed(self) -> bytes:
        prefix = _PREFIX.pack(MAGIC, FORMAT, len(self.signature), len(self.manifest))
        return prefix + self.manifest + self.signature

    @property
    def contents(self) -> Contents:
        """What a client reads of it. Raises :class:`ImageCorrupt`."""
        try:
            return msgspec.json.decode(self.manifest, type=Contents)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ImageCorrupt(
                f"the manifest of the image cannot be read ({error})", hint=FOREIGN
            ) from error


def read_head(read: Callable[[int], bytes], what: str = "what was sent") -> Head:
    """Read a head with ``read``, which returns as many bytes as it is asked for, of ``what``.

    Raises :class:`ImageCorrupt`, and :class:`Unsupported` if a newer phosd has written it.
    """
    magic, made_as, signature, manifest = _PREFIX.unpack(read(_PREFIX.size))
    if magic != MAGIC:
        raise ImageCorrupt(f"{what} is not the image of a phosd", hint=FOREIGN)
    require_format(made_as)
    if manifest > MAX_MANIFEST or signature > MAX_SIGNATURE:
        raise ImageCorrupt(
            f"the image begins with a manifest of {human_bytes(manifest)} and a signature of "
            f"{human_bytes(signature)}, more than the {human_bytes(MAX_MANIFEST)} and "
            f"{human_bytes(MAX_SIGNATURE)} that are read",
            hint=FOREIGN,
        )
    return Head(read(manifest), read(signature))


def require_format(made_as: int) -> None:
    """Raise :class:`Unsupported` unless this phosd reads images of this format."""
    if made_as == FORMAT:
        return
    whom = "a newer phosd" if made_as > FORMAT else "an older phosd"
    raise Unsupported(
        f"the image was made by {whom}, format {made_as}; this one reads {FORMAT}",
        hint="install that phosd here, or have this one export it",
        reason=Reason.OTHER_FORMAT,
    )


def packed_map(wanted: Sequence[bool]) -> bytes:
    """Return a map of chunks: the first chunk is the lowest bit of the first byte."""
    found = bytearray(map_bytes(len(wanted)))
    for index, each in enumerate(wanted):
        found[index >> 3] |= each << (index & 7)
    return bytes(found)


def mapped(packed: bytes, count: int) -> Iterable[int]:
    """Yield the indices of the wanted ones of ``count`` chunks."""
    return (index for index in range(count) if packed[index >> 3] >> (index & 7) & 1)


def map_bytes(count: int) -> int:
    """Return the size of a map of ``count`` chunks."""
    return -(-count // 8)
