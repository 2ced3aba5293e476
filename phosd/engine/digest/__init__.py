"""Compute the digest of chunks: 128 bits of up to 2 MiB, with equal values on GPU and CPU.

Guarantee: the key is secret (32 random bytes of the store, mode 0600). For any two different
contents of one length, chosen by someone who does not know the key, the probability over the key
that the digests are equal is at most about 2^-110: a pass of NH misses a difference with at most 17
* 2^-32 (every multiple of the prime counts), its polynomials with less than 2^-46, and four passes
with shifted keys are independent; SipHash adds 2^-128 and separates lengths. That covers every
accidental write, sparse or dense, not only random ones: with 10^9 chunks in a store the probability
that any pair collides is below 2^-50.

Against an attacker who chooses contents: while the key is secret the digest is a message
authentication code, as strong as SipHash-2-4 is a pseudo-random function, even if digests are seen.
Anyone who can read the key can make collisions and forge an image, so root must own the store. An
attacker's own process can lie about its own memory; that is not prevented, and need not be.
"""

import ctypes
import functools
import hashlib
import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from phosd.engine.system import native
from phosd.errors import Internal

SIZE = 16
"""Bytes of a digest."""
ALIGNMENT = 16
"""Addresses and lengths are multiples of this many bytes."""
LANES = 256
"""Threads of a thread block of the kernel."""
KERNEL = "phos_digest"
"""Name of the entry function in ``digest.ptx``."""

_PRIME = (1 << 61) - 1
_LAYOUT = struct.Struct("<4Q32Q2Q38I")
_CHUNK = struct.Struct("<2Q")


class DigestKey:
    """The key for both the kernel and the CPU, derived from a store's secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise Internal(f"a digest secret of {len(secret)} bytes is too short", "use 32 bytes")
        stream = hashlib.shake_256(b"phosd chunk digest 1\0" + secret).digest(_LAYOUT.size)
        words = list(_LAYOUT.unpack(stream))
        words[:36] = [word & _PRIME for word in words[:36]]
        self.packed = _LAYOUT.pack(*words)
        """``Key`` of digest.h, byte for byte."""

    @classmethod
    def from_packed(cls, packed: bytes) -> "DigestKey":
        """Return the key with this :attr:`packed` form, which another process sent."""
        if len(packed) != _LAYOUT.size:
            raise Internal(f"a packed digest key has {_LAYOUT.size} bytes, not {len(packed)}")
        key = cls.__new__(cls)
        key.packed = packed
        return key


def pack_chunks(ranges: Iterable[tuple[int, int]]) -> bytes:
    """Return the table of (address, length) for kernel and library, 16 bytes per chunk."""
    return b"".join(_CHUNK.pack(address, length) for address, length in ranges)


def ptx() -> bytes:
    """Return ``phos_digest(Key key, const Chunk* chunks, uint128* digests)`` as PTX text.

    Launch one block of :data:`LANES` threads per chunk.
    """
    return (Path(__file__).parent / "digest.ptx").read_bytes()


def digest_ranges(
    key: DigestKey, ranges: Sequence[tuple[int, int]], *, portable: bool = False
) -> list[bytes]:
    """Return the digest of each (address, length in bytes) of this process's memory.

    The caller keeps the memory alive. Releases the GIL; use threads for more than one core.
    ``portable`` avoids vector instructions (for tests).
    """
    if any((address | length) % ALIGNMENT for address, length in ranges):
        raise Internal("the address and length of a chunk must be multiples of 16 bytes")
    out = ctypes.create_string_buffer(SIZE * len(ranges))
    _library().phos_digest_chunks(key.packed, pack_chunks(ranges), len(ranges), out, int(portable))
    return split(out.raw)


def digest_buffer(
    key: DigestKey, data: "bytearray | memoryview | mmap.mmap | bytes", chunk: int = 2 << 20
) -> list[bytes]:
    """Return the digest of each ``chunk`` bytes of ``data``; the last chunk may be shorter.

    Read-only or unaligned data is copied first. Its length must be a multiple of 16 bytes.
    """
    view = memoryview(data)
    length = view.nbytes
    if not length:
        return []
    if view.readonly or ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT:
        copy = mmap.mmap(-1, length)
        copy[:] = view.cast("B")
        view = memoryview(copy)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    ranges = [(address + at, min(chunk, length - at)) for at in range(0, length, chunk)]
    return digest_ranges(key, ranges)


def split(digests: bytes) -> list[bytes]:
    """Split concatenated digests into a list."""
    return [digests[at : at + SIZE] for at in range(0, len(digests), SIZE)]


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(native.digest_library()))
    library.phos_digest_key_bytes.restype = ctypes.c_size_t
    if library.phos_digest_key_bytes() != _LAYOUT.size:
        raise Internal("libphos_digest.so is of another version", hint="run `make build` again")
    library.phos_digest_chunks.restype = None
    library.phos_digest_chunks.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_int,
    ]
    return library
