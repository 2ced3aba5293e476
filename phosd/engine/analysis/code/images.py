"""Split what ``cuModuleLoad`` and ``cuLibraryLoad`` are given into cubins and PTX.

The formats are told apart by their first bytes: a cubin, a fat binary with any number of cubins
and PTX texts, a library that has fat binaries inside, or PTX text. Fat binaries are not
documented; the layout is that of ``cuda_runtime_api``'s ``fatbinary.h`` and what nvcc writes.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from mmap import mmap
from typing import TypeAlias

from phosd.engine.analysis.code.cubin import MAX_BYTES
from phosd.engine.analysis.code.tools import how_to_get
from phosd.errors import Internal, Unsupported

Bytes: TypeAlias = bytes | mmap

_FAT = struct.pack("<I", 0xBA55ED50)
_ELF = b"\x7fELF"
_CUDA_MACHINE = 190  # EM_CUDA
_PTX, _CUBIN = 1, 2
_LZ4, _ZSTD = 0x2000, 0x8000


class Form(Enum):
    """What an entry's bytes are."""

    CUBIN = "cubin"
    PTX = "ptx"


@dataclass(frozen=True)
class Entry:
    """One entry of an image, still compressed. ``architecture`` is 90 for sm_90 and compute_90, and
    0 where only the bytes tell.
    """

    form: Form
    architecture: int
    payload: bytes
    flags: int = 0
    plain_bytes: int = 0

    def read(self) -> bytes:
        """Return the plain bytes. Raises :class:`Unsupported` for what cannot be decompressed."""
        if not self.flags & (_LZ4 | _ZSTD):
            return self.payload
        if not 0 < self.plain_bytes <= MAX_BYTES:
            raise _damaged(f"an entry has {self.plain_bytes} bytes")
        try:
            plain = _decompress(self.payload, self.plain_bytes, self.flags)
        except ValueError as error:
            raise _damaged(f"an entry cannot be decompressed: {error}") from error
        if len(plain) != self.plain_bytes:
            raise _damaged(f"an entry has {len(plain)} of {self.plain_bytes} bytes")
        return plain


def entries(image: bytes) -> Iterator[Entry]:
    """Yield the entries of an image of any form. Raises :class:`Unsupported` if it is none."""
    if image.startswith(_ELF):
        if len(image) >= 20 and struct.unpack_from("<H", image, 18)[0] == _CUDA_MACHINE:
            yield Entry(Form.CUBIN, 0, image)
        else:
            yield from _inside(image)
    elif image.startswith(_FAT):
        yield from _of_fat_binary(image, 0)[0]
    elif b".version" in image[:4096] and b".target" in image[:65536]:
        yield Entry(Form.PTX, 0, image.split(b"\0", 1)[0])
    else:
        raise Unsupported(
            "the file is no cubin, fat binary, PTX text or library",
            hint="name one of these; `cuobjdump -lelf FILE` lists what a library holds",
            reason="unreadable-module",
        )


def loadable(file: Bytes) -> Iterator[bytes]:
    """Yield what a program may load of a file: each fat binary in a library, else the file itself,
    if it is a module.
    """
    if file[:4] == _FAT or file[18:20] == struct.pack("<H", _CUDA_MACHINE):
        yield file[:]
    elif file[:4] == _ELF:
        for start, end in _places(file):
            yield file[start:end]
    elif b".version" in file[:4096] and b".target" in file[:65536]:
        yield file[:]


def _damaged(what: str) -> Unsupported:
    return Unsupported(
        f"the fat binary is damaged: {what}",
        hint="its kernels count as writing everywhere; compile it again, then phosd analyses them",
        reason="unreadable-module",
    )


def _inside(library: bytes) -> Iterator[Entry]:
    """Yield the entries of all fat binaries in a file."""
    for start, _ in _places(library):
        yield from _of_fat_binary(library, start)[0]


def _places(library: Bytes) -> Iterator[tuple[int, int]]:
    """Yield where each fat binary in a file begins and ends. The magic number may occur by chance:
    what is no fat binary there is passed over.
    """
    at = library.find(_FAT)
    while at >= 0:
        try:
            _, end = _of_fat_binary(library, at)
            yield at, end
        except Unsupported:
            end = at + len(_FAT)
        at = library.find(_FAT, end)


def _of_fat_binary(image: Bytes, start: int) -> tuple[list[Entry], int]:
    """Return the entries of the fat binary at ``start``, and where it ends."""
    found = []
    try:
        version, header, size = struct.unpack_from("<HHQ", image, start + 4)
        at, end = start + header, start + header + size
        if version != 1 or header < 16 or end > len(image):
            raise _damaged(f"version {version}, {size} bytes")
        while at < end:
            kind, _, header, padded, compressed = struct.unpack_from("<HHIQI", image, at)
            architecture, _, _, flags = struct.unpack_from("<IIIQ", image, at + 28)
            (plain,) = struct.unpack_from("<Q", image, at + 56)
            if header < 64 or at + header + padded > end:
                raise _damaged("an entry ends behind it")
            if kind in (_PTX, _CUBIN):
                packed = flags & (_LZ4 | _ZSTD)
                length = compressed if packed and compressed <= padded else padded
                payload = image[at + header : at + header + length]
                form = Form.PTX if kind == _PTX else Form.CUBIN
                found.append(Entry(form, architecture, payload, flags, plain))
            at += header + padded
    except struct.error as error:
        raise _damaged(str(error)) from error
    return found, end


def _decompress(data: bytes, size: int, flags: int) -> bytes:
    try:
        import lz4.block
        import zstandard
    except ImportError as error:
        raise Internal(
            f"a fat binary is compressed, and {error.name} is not installed",
            hint=how_to_get(),
            reason="missing-package",
        ) from error
    if flags & _ZSTD:
        try:
            # The frame may claim any size: the stream ends where the entry says.
            with zstandard.ZstdDecompressor().stream_reader(data) as stream:
                plain: bytes = stream.read(size)
                return plain
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
    try:
        unpacked: bytes = lz4.block.decompress(data, uncompressed_size=size)
        return unpacked
    except lz4.block.LZ4BlockError as error:
        raise ValueError(str(error)) from error
