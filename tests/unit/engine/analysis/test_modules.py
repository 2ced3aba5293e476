"""Modules as programs load them: what is found in them, and what damaged ones lead to."""

from __future__ import annotations

import random
import struct
from functools import cache

import pytest

from phosd.engine.analysis.code import cubin
from phosd.engine.analysis.code.images import Form, entries
from phosd.engine.analysis.summary import cubins
from phosd.errors import Unsupported

PTX = b".version 9.0\n.target sm_90\n.address_size 64\n"
SECTION = "<2I4Q2I2Q"


@cache
def made() -> bytes:
    """A cubin with a kernel ``k`` of two parameters, and a subroutine in its code."""
    info = struct.pack("<BBHIHH", 4, 0x0A, 8, 0, 0x210, 12)
    info += struct.pack("<BBH", 3, 0x19, 12)
    info += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 1, 8, 4 << 18)
    info += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 0, 0, 8 << 18)
    names = b"\0.text.k\0.nv.info.k\0.strtab\0.symtab\0.rela.nv.constant4\0"
    strings = b"\0k\0divide\0__assertfail\0"
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    symbols += struct.pack("<IBBHQQ", 1, 0x12, 0x10, 1, 0, 0x40)
    symbols += struct.pack("<IBBHQQ", 3, 0x02, 0, 1, 0x20, 0x20)
    symbols += struct.pack("<IBBHQQ", 10, 0x10, 0, 0, 0, 0)
    parts = [b"", b"\x90" * 64, info, strings, symbols, struct.pack("<QQq", 8, 3 << 32, 0), names]
    kinds = [0, 1, 0x70000000, 3, 2, 4, 3]
    at = [0, *(names.index(word) for word in (b".text", b".nv", b".strtab", b".symtab", b".rela"))]
    place = 64 + 64 * len(parts)
    headers = b""
    for name, kind, part in zip([*at, 0], kinds, parts, strict=True):
        headers += struct.pack(SECTION, name, kind, 0, 0, place, len(part), 0, 0, 0, 0)
        place += len(part)
    magic = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
    rest = struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64, 0x6005A04, 64, 0, 0, 64, len(parts), len(parts) - 1
    )
    return magic + rest + headers + b"".join(parts)


def test_a_cubin() -> None:
    (kernel,) = cubin.read(made()).values()
    assert (kernel.name, kernel.base, kernel.size) == ("k", 0x210, 12)
    assert kernel.parameters == (cubin.Parameter(0, 8), cubin.Parameter(8, 4))
    assert kernel.subroutines == {"k": 0, "divide": 0x20}
    assert kernel.addresses == {8: "__assertfail"}


def test_a_damaged_cubin_is_read_or_refused() -> None:
    image = made()
    random_ = random.Random(5)
    damaged = [image[:length] for length in range(0, len(image), 7)]
    for _ in range(1500):
        changed = bytearray(image)
        for _ in range(random_.randrange(1, 4)):
            changed[random_.randrange(len(image))] = random_.choice((0, 1, 0x7F, 0x80, 0xFF))
        damaged.append(bytes(changed))
    refused = 0
    for one in damaged:
        try:
            cubin.read(one)
        except Unsupported:
            refused += 1
    assert 0 < refused < len(damaged)


def fat(*parts: tuple[int, int, int, bytes, int]) -> bytes:
    """A fat binary of parts: kind, architecture, flags, payload, plain size."""
    body = b""
    for kind, architecture, flags, payload, plain in parts:
        padded = payload + bytes(-len(payload) % 8)
        body += struct.pack("<HHIQI", kind, 0x101, 64, len(padded), len(payload))
        body += struct.pack("<IHHIIIQQQ", 0, 0, 0, architecture, 0, 0, flags, 0, plain) + padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_fat_binary() -> None:
    import lz4.block
    import zstandard

    plain = made()
    zstd = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    packed = lz4.block.compress(PTX, store_size=False)
    image = fat(
        (2, 90, 0x11, plain, 0),
        (2, 80, 0x8011, zstd, len(plain)),
        (1, 90, 0x2011, packed, len(PTX)),
    )
    for whole in (image, b"\x7fELF" + bytes(60) + image + b"behind"):
        found = list(entries(whole))
        assert [(one.form, one.architecture) for one in found] == [
            (Form.CUBIN, 90),
            (Form.CUBIN, 80),
            (Form.PTX, 90),
        ]
        assert [one.read()[: len(plain)] for one in found] == [plain, plain, PTX]


def test_the_code_that_a_gpu_runs() -> None:
    """As the driver chooses: the latest cubin of its generation that is not too new."""
    plain = made()
    image = fat(*((2, architecture, 0x11, plain + bytes([architecture]), 0)
                  for architecture in (75, 80, 86, 90)))  # fmt: skip

    def chosen(architecture: int) -> list[int]:
        return [code[len(plain)] for code in cubins(image, architecture)]

    assert [chosen(architecture) for architecture in (75, 80, 87, 89, 90)] == [
        [75],
        [80],
        [86],
        [86],
        [90],
    ]
    with pytest.raises(Unsupported, match="no code for sm_100"):
        chosen(100)


def test_other_modules() -> None:
    assert [one.form for one in entries(made())] == [Form.CUBIN]
    (text,) = entries(PTX + b"\0 behind it")
    assert (text.form, text.read()) == (Form.PTX, PTX)
    with pytest.raises(Unsupported, match="no cubin, fat binary"):
        list(entries(b"MZ" + bytes(100)))


@pytest.mark.parametrize(
    ("flags", "payload", "plain"),
    [
        (0x8011, b"no frame", 100),
        (0x2011, b"\xff" * 40, 100),
        (0x8011, b"", 0),
        (0x2011, b"\0", 1 << 40),
    ],
)
def test_an_entry_that_cannot_be_decompressed(flags: int, payload: bytes, plain: int) -> None:
    (one,) = entries(fat((2, 90, flags, payload, plain)))
    with pytest.raises(Unsupported, match="the fat binary is damaged"):
        one.read()


def test_an_entry_that_is_larger_than_it_claims() -> None:
    import zstandard

    payload = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    (one,) = entries(fat((2, 90, 0x8011, payload, 100)))
    assert one.read() == bytes(100)


def test_a_damaged_fat_binary_is_read_or_refused() -> None:
    image = fat((2, 90, 0x11, made(), 0), (1, 90, 0x11, PTX, 0))
    random_ = random.Random(6)
    for _ in range(500):
        changed = bytearray(image)
        changed[random_.randrange(4, 160)] = random_.randrange(256)
        try:
            for entry in entries(bytes(changed)):
                entry.read()
        except Unsupported:
            pass
