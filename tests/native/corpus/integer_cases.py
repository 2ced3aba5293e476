"""Integer arithmetic, bits and permutations."""
# ruff: noqa: E501 (the kernels keep their own lines)

from __future__ import annotations

from typing import Any

import numpy as np

from tests.native.corpus.case import COUNT, Array, Case, elementwise, integers, rng


def _ints(name: str, *dtypes: str) -> list[Array]:
    generator = rng(name)
    return [integers(generator, COUNT, dtype) for dtype in dtypes]


def _arithmetic() -> list[Case]:
    cases = []
    for dtype in ("uint16", "int32", "uint32", "int64", "uint64"):
        name = f"integer_mix_{dtype}"

        def mix(a: Array, b: Array, c: Array) -> Array:
            with np.errstate(over="ignore"):
                result: Array = (a + b) * c - (a ^ b) + (a & c) - (b | ~c)
                return result

        cases.append(
            elementwise(
                name,
                "r = (a + b) * c - (a ^ b) + (a & c) - (b | ~c);",
                _ints(name, dtype, dtype, dtype),
                dtype,
                mix,
            )
        )
    for dtype in ("int32", "uint32", "int64", "uint64"):
        name = f"divide_{dtype}"
        a, b = _ints(name, dtype, dtype)
        b = np.where((b == 0) | (b == np.array(-1).astype(dtype)), np.array(7, dtype), b)

        def divide(a: Array, b: Array) -> Array:
            with np.errstate(over="ignore"):
                quotient = _truncated(a, b)
                result: Array = quotient * 3 + (a - quotient * b)
                return result

        cases.append(elementwise(name, "r = (a / b) * 3 + a % b;", [a, b], dtype, divide))
    return cases


def _truncated(a: Array, b: Array) -> Array:
    if a.dtype.kind == "u":
        return a // b
    return np.array([_divide(x, y) for x, y in zip(_wide(a), _wide(b), strict=True)], a.dtype)


def _divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _wide(a: Array) -> list[int]:
    return [int(x) for x in a]


def _high(bits: int) -> Any:
    def high(a: Array, b: Array) -> Array:
        values = [(x * y) >> bits for x, y in zip(_wide(a), _wide(b), strict=True)]
        mask = (1 << bits) - 1
        return np.array([v & mask for v in values], f"uint{bits}").view(a.dtype)

    return high


def _products() -> list[Case]:
    return [
        elementwise("mulhi_u32", "r = __umulhi(a, b);", _ints("a", "uint32", "uint32"), "uint32", _high(32)),
        elementwise("mulhi_s32", "r = __mulhi(a, b);", _ints("b", "int32", "int32"), "int32", _high(32)),
        elementwise("mulhi_u64", "r = __umul64hi(a, b);", _ints("c", "uint64", "uint64"), "uint64", _high(64)),
        elementwise("mulhi_s64", "r = __mul64hi(a, b);", _ints("d", "int64", "int64"), "int64", _high(64)),
        elementwise("mul24", "r = __umul24(a, b) + __mul24((int)a, (int)b);", _ints("e", "uint32", "uint32"), "uint32"),
        elementwise(
            "mul_wide", "r = (long long)a * b + (unsigned long long)((unsigned)a) * (unsigned)b;",
            _ints("f", "int32", "int32"), "int64",
        ),
        elementwise("sad", "r = __sad(a, b, 17u) + __usad(a, b, 3u);", _ints("g", "int32", "int32"), "uint32"),
        elementwise("average", "r = __hadd(a, b) ^ __rhadd(a, b) ^ __uhadd(a, b);", _ints("h", "int32", "int32"), "int32"),
        elementwise(
            "minmax", "r = min(a, b) * 3 + max(a, b) + (int)min((unsigned)a, (unsigned)b) + abs(a);",
            _ints("i", "int32", "int32"), "int32",
        ),
        elementwise(
            "saturating",
            'int s, d, m; asm("add.sat.s32 %0, %1, %2;" : "=r"(s) : "r"(a), "r"(b));'
            'asm("sub.sat.s32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));'
            'asm("mad.hi.sat.s32 %0, %1, %2, %1;" : "=r"(m) : "r"(a), "r"(b)); r = s ^ (d << 1) ^ m;',
            _ints("j", "int32", "int32"), "int32",
        ),
        elementwise("dp4a", "r = __dp4a(a, b, 5) + (int)__dp4a((unsigned)a, (unsigned)b, 9u);", _ints("k", "int32", "int32"), "int32"),
        elementwise(
            "dp2a", "r = __dp2a_lo(a, b, 5) + __dp2a_hi(a, b, 1) + (int)__dp2a_lo((unsigned)a, (unsigned)b, 9u);",
            _ints("l", "int32", "int32"), "int32",
        ),
        elementwise(
            "carry_chain",
            'unsigned w0, w1, w2; asm("add.cc.u32 %0, %3, %4; addc.cc.u32 %1, %4, %3; addc.u32 %2, %3, 0;"'
            ' : "=r"(w0), "=r"(w1), "=r"(w2) : "r"(a), "r"(b));'
            'unsigned x0, x1; asm("sub.cc.u32 %0, %2, %3; subc.u32 %1, %3, %2;" : "=r"(x0), "=r"(x1) : "r"(a), "r"(b));'
            'unsigned y0, y1; asm("mad.lo.cc.u32 %0, %2, %3, %2; madc.hi.u32 %1, %2, %3, %3;" : "=r"(y0), "=r"(y1) : "r"(a), "r"(b));'
            "r = w0 ^ w1 * 3 ^ w2 * 5 ^ x0 * 7 ^ x1 * 11 ^ y0 * 13 ^ y1 * 17;",
            _ints("m", "uint32", "uint32"), "uint32",
        ),
        elementwise("int128", "unsigned __int128 p = (unsigned __int128)a * b + a; p = p << 3 | p >> 90; r = (unsigned long long)(p >> 64) ^ (unsigned long long)p;", _ints("n", "uint64", "uint64"), "uint64"),
    ]  # fmt: skip


def _bits() -> list[Case]:
    u32 = ("uint32", "uint32")
    return [
        elementwise(
            "shifts",
            'unsigned s = b & 63, l, q; asm("shl.b32 %0, %1, %2;" : "=r"(l) : "r"(a), "r"(s));'
            'asm("shr.s32 %0, %1, %2;" : "=r"(q) : "r"(a), "r"(s)); r = l ^ q ^ (a >> (s & 31));',
            _ints("o", *u32), "uint32",
        ),
        elementwise(
            "shifts_64",
            'unsigned s = (unsigned)b & 127; unsigned long long l, q; asm("shl.b64 %0, %1, %2;" : "=l"(l) : "l"(a), "r"(s));'
            'asm("shr.s64 %0, %1, %2;" : "=l"(q) : "l"(a), "r"(s)); r = l ^ q;',
            _ints("p", "uint64", "uint64"), "uint64",
        ),
        elementwise(
            "funnel_shift",
            "r = __funnelshift_l(a, b, b) ^ __funnelshift_r(a, b, a) * 3 ^ __funnelshift_lc(a, b, b & 63) * 5 ^ __funnelshift_rc(b, a, a & 63) * 7;",
            _ints("q", *u32), "uint32",
        ),
        elementwise(
            "count_bits", "r = __popc(a) | __clz(b) << 8 | __ffs(a) << 16 | __popcll((unsigned long long)a << 32 | b) << 24;",
            _ints("r", *u32), "uint32",
            lambda a, b: np.array(
                [
                    (x.bit_count() | (32 - y.bit_length()) << 8 | ((x & -x).bit_length()) << 16
                     | (x.bit_count() + y.bit_count()) << 24) & 0xFFFFFFFF
                    for x, y in zip(_wide(a), _wide(b), strict=True)
                ],
                np.uint32,
            ),
        ),
        elementwise(
            "reverse", "r = __brev(a) ^ (unsigned)(__brevll((unsigned long long)a << 32 | b) >> 7);",
            _ints("s", *u32), "uint32",
        ),
        elementwise("permute", "r = __byte_perm(a, b, a >> 3) ^ __byte_perm(b, a, 0x8f2c);", _ints("t", *u32), "uint32"),
        elementwise(
            "permute_modes",
            "unsigned v; r = 0;"
            + "".join(
                f'asm("prmt.b32.{mode} %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(a >> 5)); r = r * 31 + v;'
                for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
            ),
            _ints("u", *u32), "uint32",
        ),
        elementwise(
            "bit_fields",
            'unsigned p = b & 31, n = (b >> 8) & 63, x, z; int y; asm("bfe.u32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(p), "r"(n));'
            'asm("bfe.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(p), "r"(n));'
            'asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(z) : "r"(a), "r"(b), "r"(p), "r"(n)); r = x + y * 3 + z * 7;',
            _ints("v", *u32), "uint32",
        ),
        elementwise(
            "bit_fields_64",
            'unsigned p = (unsigned)b & 63, n = ((unsigned)b >> 8) & 127; unsigned long long x, z; long long y;'
            'asm("bfe.u64 %0, %1, %2, %3;" : "=l"(x) : "l"(a), "r"(p), "r"(n)); asm("bfe.s64 %0, %1, %2, %3;" : "=l"(y) : "l"(a), "r"(p), "r"(n));'
            'asm("bfi.b64 %0, %1, %2, %3, %4;" : "=l"(z) : "l"(a), "l"(b), "r"(p), "r"(n)); r = x + y * 3 + z * 7;',
            _ints("w", "uint64", "uint64"), "uint64",
        ),
        elementwise(
            "find_bit",
            'unsigned x, y, z; asm("bfind.u32 %0, %1;" : "=r"(x) : "r"(a)); asm("bfind.shiftamt.u32 %0, %1;" : "=r"(y) : "r"(b));'
            'asm("bfind.s32 %0, %1;" : "=r"(z) : "r"(a)); r = x + y * 256 + z * 65536;',
            _ints("x", *u32), "uint32",
        ),
        elementwise(
            "logic3",
            "unsigned v; r = 0;"
            + "".join(
                f'asm("lop3.b32 %0, %1, %2, %3, {table};" : "=r"(v) : "r"(a), "r"(b), "r"(a >> 7 ^ b)); r = r * 5 + v;'
                for table in (0x96, 0xE8, 0x1D, 0x80, 0xFE)
            ),
            _ints("y", *u32), "uint32",
        ),
        elementwise(
            "narrow_integers",
            "signed char x = (signed char)a; unsigned char y = (unsigned char)b; short z = (short)(a >> 8); r = x * y + z - (x >> 2) + (unsigned short)(z * 3);",
            _ints("z", "int32", "int32"), "int32",
        ),
        elementwise(
            "saturating_conversion",
            'int x, y; unsigned z; asm("{.reg .s8 t; cvt.sat.s8.s32 t, %1; cvt.s32.s8 %0, t;}" : "=r"(x) : "r"(a));'
            'asm("{.reg .u16 t; cvt.sat.u16.s32 t, %1; cvt.u32.u16 %0, t;}" : "=r"(y) : "r"(a));'
            'asm("cvt.sat.u32.s64 %0, %1;" : "=r"(z) : "l"((long long)a * b)); r = x + y * 3 + z;',
            _ints("A", "int32", "int32"), "int32",
            ),
        elementwise("halves_16", "r = __vadd2(a, b) ^ __vmins2(a, b) * 3 ^ __vmaxu2(a, b) * 5;", _ints("B", *u32), "uint32"),
    ]  # fmt: skip


def cases() -> list[Case]:
    return _arithmetic() + _products() + _bits()
