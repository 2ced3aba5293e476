"""The chunk digest against a plain Python rendering of its definition, and its laws."""

import ctypes
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phosd.engine import digest
from phosd.engine.digest import DigestKey, make_ptx
from phosd.errors import Internal

MASK64 = (1 << 64) - 1
PRIME = (1 << 61) - 1
KEY = DigestKey(bytes(range(32)))


def siphash_128(key: tuple[int, int], message: bytes) -> bytes:
    """SipHash-2-4 with 16 bytes of output, from its paper."""

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & MASK64

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & MASK64
            v[1] = rotate(v[1], 13) ^ v[0]
            v[0] = rotate(v[0], 32)
            v[2] = (v[2] + v[3]) & MASK64
            v[3] = rotate(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & MASK64
            v[3] = rotate(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & MASK64
            v[1] = rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    initial = [
        int.from_bytes(b"somepseudorandomlygeneratedbytes"[i : i + 8]) for i in (0, 8, 16, 24)
    ]
    v = [initial[i] ^ key[i % 2] for i in range(4)]
    v[1] ^= 0xEE
    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    out = b""
    for constant in ((2, 0xEE), (1, 0xDD)):
        v[constant[0]] ^= constant[1]
        rounds(4)
        out += struct.pack("<Q", v[0] ^ v[1] ^ v[2] ^ v[3])
    return out


def reference(key: DigestKey, data: bytes) -> bytes:
    """The definition of digest.h, word by word and with exact integers."""
    fields = struct.unpack("<4Q32Q2Q38I", key.packed)
    fold, tree, sip, nh = fields[:4], fields[4:36], fields[36:38], fields[38:]
    padded = data + bytes(-len(data) % 32768)
    words = struct.unpack(f"<{len(padded) // 4}I", padded)
    state = [[0] * 4 for _ in range(256)]
    for base in range(0, len(padded), 32768):
        for lane in range(256):
            mine: list[int] = []
            for vector in range(8):
                at = (base + lane // 32 * 4096 + vector * 512 + lane % 32 * 16) // 4
                mine += words[at : at + 4]
            for p in range(4):
                total = sum(
                    (mine[i] + nh[i + 2 * p]) % 2**32 * ((mine[i + 1] + nh[i + 1 + 2 * p]) % 2**32)
                    for i in range(0, 32, 2)
                )
                state[lane][p] = (state[lane][p] * fold[p] + total % 2**64) % PRIME
    for level in range(8):
        half = 256 >> (level + 1)
        for lane in range(half):
            for p in range(4):
                state[lane][p] = (
                    state[lane][p] * tree[4 * level + p] + state[lane + half][p]
                ) % PRIME
    return siphash_128((sip[0], sip[1]), struct.pack("<5Q", *state[0], len(data)))


def of(data: bytes, *, portable: bool = False) -> bytes:
    buffer = bytearray(len(data) + 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    shift = -address % 16
    buffer[shift : shift + len(data)] = data
    return digest.digest_ranges(KEY, [(address + shift, len(data))], portable=portable)[0]


def test_siphash_gives_the_published_vector() -> None:
    key = struct.unpack("<2Q", bytes(range(16)))
    assert siphash_128(key, b"").hex() == "a3817f04ba25a8e66df67214c7550293"


@pytest.mark.parametrize("length", [0, 16, 512, 4096, 4112, 32768, 65536 + 48])
@pytest.mark.parametrize("portable", [False, True])
def test_equals_the_definition(length: int, portable: bool) -> None:
    data = bytes((i * 167 + i // 251) % 256 for i in range(length))
    assert of(data, portable=portable) == reference(KEY, data)


def test_extreme_words_equal_the_definition() -> None:
    for data in (b"\xff" * 65536, b"\0" * 65536, b"\0\0\0\x80" * 16384):
        assert of(data) == of(data, portable=True) == reference(KEY, data)


@settings(max_examples=60)
@given(st.integers(0, 4096), st.integers(0, 2**32), st.data())
def test_any_changed_bit_changes_the_digest(vectors: int, seed: int, data: st.DataObject) -> None:
    length = 16 * (vectors + 1)
    content = bytearray(seed.to_bytes(8, "little") * (length // 8))
    before = of(bytes(content))
    bit = data.draw(st.integers(0, 8 * length - 1))
    content[bit // 8] ^= 1 << bit % 8
    after = of(bytes(content))
    assert after != before
    assert after == of(bytes(content), portable=True)


def test_moved_and_cancelling_changes_show() -> None:
    """Changes that a plain xor, sum or multiply-rotate hash takes for none."""
    base = bytearray(65536)
    seen = {of(bytes(base))}
    for first, second in ((0, 8), (0, 16), (0, 512), (4096, 8192), (0, 32768), (100, 33000)):
        for bit in (0, 31, 63):
            changed = bytearray(base)
            changed[first + bit // 8] ^= 1 << bit % 8
            changed[second + bit // 8] ^= 1 << bit % 8
            seen.add(of(bytes(changed)))
    assert len(seen) == 1 + 6 * 3


def test_length_and_key_belong_to_the_digest() -> None:
    assert len({of(bytes(length)) for length in range(0, 65536, 1024)}) == 64
    data = bytearray(4096)
    other = DigestKey(b"another secret of 32 bytes......")
    assert digest.digest_buffer(KEY, data) != digest.digest_buffer(other, data)


def test_buffers_are_cut_into_chunks() -> None:
    data = bytes(range(256)) * 40
    whole = digest.digest_buffer(KEY, data, chunk=4096)
    assert whole == [of(data[:4096]), of(data[4096:8192]), of(data[8192:])]
    assert digest.digest_buffer(KEY, b"") == []


def test_refuses_what_it_cannot_hash() -> None:
    with pytest.raises(Internal, match="multiples of 16"):
        digest.digest_ranges(KEY, [(4096, 8)])
    with pytest.raises(Internal, match="too short"):
        DigestKey(b"short")


def test_the_shipped_kernel_is_what_the_source_compiles_to() -> None:
    assert make_ptx.compile_ptx() == Path(digest.__file__).with_name("digest.ptx").read_text()
