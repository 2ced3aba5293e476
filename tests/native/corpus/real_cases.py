"""f32, f64, f16 and bf16: arithmetic, conversion, comparison, approximate functions."""
# ruff: noqa: E501 (the kernels keep their own lines)

from __future__ import annotations

import numpy as np

from tests.native.corpus.case import (
    COUNT,
    Array,
    Case,
    Reference,
    bits32,
    bits64,
    elementwise,
    integers,
    rng,
)

_NAN = np.uint32(0x7FFFFFFF)


def _f32(name: str, count: int) -> list[Array]:
    generator = rng(name)
    return [bits32(generator, COUNT) for _ in range(count)]


def _f64(name: str, count: int) -> list[Array]:
    generator = rng(name)
    return [bits64(generator, COUNT) for _ in range(count)]


def _canonical(values: Array) -> Array:
    return np.where(np.isnan(values), _NAN, values.view(np.uint32)).view(np.float32)


def _reference32(operation: str) -> Reference:
    function = getattr(np, operation)

    def apply(*inputs: Array) -> Array:
        with np.errstate(all="ignore"):
            return _canonical(function(*inputs))

    return apply


def _reference64(operation: str) -> Reference:
    function = getattr(np, operation)

    def apply(*inputs: Array) -> Array:
        with np.errstate(all="ignore"):
            result: Array = function(*inputs)
            return result

    return apply


def _arithmetic() -> list[Case]:
    cases = []
    for name, operator in (("add", "+"), ("subtract", "-"), ("multiply", "*"), ("divide", "/")):
        cases.append(
            elementwise(
                f"{name}_f32", f"r = a {operator} b;", _f32(name, 2), "float32", _reference32(name)
            )
        )
        inputs = _f64(name, 2)
        inputs[1][inputs[1] == 0] = 3.0
        cases.append(
            elementwise(
                f"{name}_f64", f"r = a {operator} b;", inputs, "float64", _reference64(name)
            )
        )
    for name, intrinsic in (("add", "__fadd"), ("mul", "__fmul"), ("div", "__fdiv")):
        for mode in ("rz", "ru", "rd"):
            cases.append(
                elementwise(
                    f"{name}_{mode}_f32",
                    f"r = {intrinsic}_{mode}(a, b);",
                    _f32(name + mode, 2),
                    "float32",
                )
            )
    modes = ("rn", "rz", "ru", "rd")
    cases += [
        elementwise("fma_f32", " r = fmaf(a, b, c);", _f32("fma", 3), "float32"),
        elementwise("fma_f64", "r = fma(a, b, c);", _f64("fma64", 3), "float64"),
        elementwise(
            "fma_modes_f32",
            "r = 0; " + "".join(f"r += __fmaf_{m}(a, b, c) * {i + 1}.0f;" for i, m in enumerate(modes[1:])),
            _f32("fmamodes", 3), "float32",
        ),
        elementwise(
            "rounding_f64",
            "r = __dadd_rz(a, b) * 3 + __dmul_ru(a, b) - __fma_rd(a, b, a) + __ddiv_rz(a, fabs(b) + 1.0);",
            _f64("rounding64", 2), "float64",
        ),
        elementwise("sqrt_f32", "r = __fsqrt_rn(a);", _f32("sqrt", 1), "float32", _reference32("sqrt")),
        elementwise("sqrt_modes_f32", "r = __fsqrt_rz(a) - __fsqrt_ru(a) * 0.5f;", _f32("sqrtm", 1), "float32"),
        elementwise("sqrt_f64", "r = sqrt(fabs(a));", _f64("sqrt64", 1), "float64", lambda a: np.sqrt(np.abs(a))),
        elementwise("rcp_f32", "r = __frcp_rn(a);", _f32("rcp", 1), "float32", _reference32("reciprocal")),
        elementwise("rcp_rz_f32", "r = __frcp_rz(a);", _f32("rcpz", 1), "float32"),
        elementwise("rsqrt_rn_f32", "r = __frsqrt_rn(fabsf(a));", _f32("rsqrtrn", 1), "float32"),
        elementwise(
            "flush_f32",
            "float x, y, z;" 'asm("add.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));'
            'asm("mul.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));'
            'asm("fma.rn.ftz.f32 %0, %1, %2, %1;" : "=f"(z) : "f"(a), "f"(b));'
            "r = __float_as_uint(x) ^ __float_as_uint(y) * 3 ^ __float_as_uint(z) * 5;",
            _f32("flush", 2), "uint32",
        ),
        elementwise(
            "saturate_f32",
            'float x, y; asm("add.sat.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));'
            'asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));'
            "r = __float_as_uint(x) ^ __float_as_uint(y) * 3 ^ __float_as_uint(__saturatef(a)) * 5;",
            _f32("saturate", 2), "uint32",
        ),
        elementwise("minmax_f32", "r = __float_as_uint(fminf(a, b)) ^ __float_as_uint(fmaxf(a, b)) * 3;", _f32("mm", 2), "uint32"),
        elementwise(
            "minmax_nan_f32",
            'float x, y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));'
            'asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); r = __float_as_uint(x) ^ __float_as_uint(y) * 3;',
            _f32("mmn", 2), "uint32", arch="compute_80",
        ),
        elementwise("minmax_f64", "r = __dsub_rn(__dmul_rn(fmin(a, b), 3.0), fmax(a, b));", _f64("mm64", 2), "float64"),
        elementwise(
            "compare_f32",
            "r = (a < b) | (a <= b) << 1 | (a == b) << 2 | (a != b) << 3 | (a > b) << 4 | (a >= b) << 5"
            " | !(a < b) << 6 | !(a >= b) << 7 | isnan(a) << 8 | isinf(b) << 9 | isfinite(a) << 10 | signbit(b) << 11;",
            _f32("compare", 2), "uint32",
        ),
        elementwise(
            "testp",
            "int v; r = 0;"
            + "".join(
                f'asm("{{.reg .pred p; testp.{test}.f32 p, %1; selp.s32 %0, 1, 0, p;}}" : "=r"(v) : "f"(a)); r = r * 2 + v;'
                for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
            ),
            _f32("testp", 1), "int32",
        ),
        elementwise(
            "sign_bits_f32", "r = __float_as_uint(copysignf(a, b)) ^ __float_as_uint(-a) * 3 ^ __float_as_uint(fabsf(b)) * 5;",
            [_finite(x) for x in _f32("sign", 2)], "uint32",
        ),
        elementwise("slct", 'asm("slct.f32.s32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "r"(__float_as_int(c)));', _f32("slct", 3), "float32"),
        elementwise(
            "set",
            'unsigned x; float y; asm("set.lt.u32.f32 %0, %1, %2;" : "=r"(x) : "f"(a), "f"(b));'
            'asm("set.geu.f32.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); r = x + __float_as_uint(y);',
            _f32("set", 2), "uint32",
        ),
    ]  # fmt: skip
    return cases


def _finite(values: Array) -> Array:
    return np.where(np.isnan(values), np.float32(1.5), values)


def _conversions() -> list[Case]:
    cases = []
    for mode in ("rn", "rz", "ru", "rd"):
        cases += [
            elementwise(
                f"float_to_int_{mode}",
                f"r = __float2int_{mode}(a) + (long long)__float2uint_{mode}(a) * 3 + __float2ll_{mode}(a) * 5 + __float2ull_{mode}(a) * 7;",
                _f32("f2i" + mode, 1), "int64",
            ),
            elementwise(
                f"double_to_int_{mode}",
                f"r = __double2int_{mode}(a) + (long long)__double2uint_{mode}(a) * 3 + __double2ll_{mode}(a) * 5 + __double2ull_{mode}(a) * 7;",
                [bits64(rng("d2i" + mode), COUNT, 70)], "int64",
            ),
            elementwise(
                f"int_to_float_{mode}",
                f"r = (long long)__float_as_uint(__int2float_{mode}((int)a)) * 3 + __float_as_uint(__uint2float_{mode}((unsigned)a)) * 5ll"
                f" + __float_as_uint(__ll2float_{mode}(a)) * 7ll + __float_as_uint(__ull2float_{mode}(a)) * 11ll;",
                [integers(rng("i2f" + mode), COUNT, "int64")], "int64",
            ),
            elementwise(
                f"int_to_double_{mode}",
                f"r = __double_as_longlong(__ll2double_{mode}(a)) ^ __double_as_longlong(__ull2double_{mode}(a)) * 3;",
                [integers(rng("i2d" + mode), COUNT, "int64")], "int64",
            ),
            elementwise(
                f"double_to_float_{mode}", f"r = __double2float_{mode}(a);", [bits64(rng("d2f" + mode), COUNT, 150)], "float32"
            ),
        ]  # fmt: skip
    cases += [
        elementwise("float_to_double", "r = a;", [_finite(_f32("f2d", 1)[0])], "float64", lambda a: a.astype(np.float64)),
        elementwise("nan_to_int", "r = __float2int_rn(a) + __float2ll_rz(a) * 3 + __double2int_rz((double)a) * 5 + __double2ll_rn((double)a) * 7;",
                    [np.array([0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000] * 64, np.uint32).view(np.float32)], "int64"),
        elementwise("integral_f32", "r = rintf(a) + truncf(a) * 3 + floorf(a) * 5 + ceilf(a) * 7;", _f32("integral", 1), "float32"),
        elementwise("integral_f64", "r = rint(a) + trunc(a) * 3 - floor(a) * 5 + ceil(a) * 7;", [bits64(rng("int64"), COUNT, 50)], "float64"),
    ]  # fmt: skip
    return cases


def _halves() -> list[Case]:
    fp16 = "#include <cuda_fp16.h>\n"
    bf16 = "#include <cuda_bf16.h>\n"
    to_half = "__ushort_as_half((unsigned short){})"
    to_pair = "*(const __half2*)&{}"
    cases = [
        elementwise(f"float_to_half_{mode}", f"r = __half_as_ushort(__float2half_{mode}(a));", _f32("f2h" + mode, 1), "uint16", prelude=fp16)
        for mode in ("rn", "rz", "ru", "rd")
    ]  # fmt: skip
    halves = [integers(rng("half" + letter), COUNT, "uint32") for letter in "abc"]
    cases += [
        elementwise("double_to_half", "r = __half_as_ushort(__double2half(a));", [bits64(rng("d2h"), COUNT, 30)], "uint16", prelude=fp16),
        elementwise("half_to_float", f"r = __half2float({to_half.format('a')});", [halves[0]], "float32", prelude=fp16),
        elementwise("half_to_int", f"r = __half2int_rn({to_half.format('a')}) * 3 + __half2int_rz({to_half.format('a')}) + __half2uint_ru({to_half.format('b')});", halves[:2], "int32", prelude=fp16),
        elementwise("int_to_half", "r = __half_as_ushort(__int2half_rn(a)) * 3 + __half_as_ushort(__ll2half_rn((long long)a << 8)) + __half_as_ushort(__uint2half_rz(a));", [integers(rng("i2h"), COUNT, "int32")], "uint32", prelude=fp16),
        elementwise(
            "half_arithmetic",
            f"__half x = {to_half.format('a')}, y = {to_half.format('b')}, z = {to_half.format('c')};"
            "r = __half_as_ushort(x + y) * 3u ^ __half_as_ushort(x - z) * 5u ^ __half_as_ushort(x * y) * 7u ^ __half_as_ushort(__hfma(x, y, z)) * 11u;",
            halves, "uint32", prelude=fp16,
        ),
        elementwise(
            "half2_arithmetic",
            f"__half2 x = {to_pair.format('a')}, y = {to_pair.format('b')}, z = {to_pair.format('c')};"
            "__half2 s = __hadd2(x, y), t = __hsub2(z, x), p = __hmul2(x, y), f = __hfma2(x, y, z), q = __hadd2_sat(x, z);"
            "r = *(unsigned*)&s * 3 ^ *(unsigned*)&t * 5 ^ *(unsigned*)&p * 7 ^ *(unsigned*)&f * 11 ^ *(unsigned*)&q * 13;",
            halves, "uint32", prelude=fp16,
        ),
        elementwise(
            "half_compare",
            f"__half x = {to_half.format('a')}, y = {to_half.format('b')}; __half2 u = {to_pair.format('a')}, v = {to_pair.format('c')};"
            "r = (x < y) | (x == y) << 1 | __hgeu(x, y) << 2 | __hne(x, y) << 3 | __hisnan(x) << 4 | __hblt2(u, v) << 5 | __hbeq2(u, u) << 6;",
            halves, "uint32", prelude=fp16,
        ),
        elementwise(
            "half_minmax",
            f"__half2 x = {to_pair.format('a')}, y = {to_pair.format('b')}; __half2 m = __hmin2(x, y), n = __hmax2_nan(x, y); r = *(unsigned*)&m ^ *(unsigned*)&n * 3;",
            halves[:2], "uint32", prelude=fp16, arch="compute_80",
        ),
        elementwise("float_to_bfloat", "r = __bfloat16_as_ushort(__float2bfloat16(a)) * 3u ^ __bfloat16_as_ushort(__float2bfloat16_rz(a));", _f32("f2b", 1), "uint32", prelude=bf16, arch="compute_90"),
        elementwise(
            "bfloat2_arithmetic",
            "const __nv_bfloat162 x = *(const __nv_bfloat162*)&a, y = *(const __nv_bfloat162*)&b, z = *(const __nv_bfloat162*)&c;"
            "__nv_bfloat162 s = __hadd2(x, y), p = __hmul2(x, y), f = __hfma2(x, y, z), q = __hmax2(x, z);"
            "r = *(unsigned*)&s * 3 ^ *(unsigned*)&p * 5 ^ *(unsigned*)&f * 7 ^ *(unsigned*)&q * 11;",
            halves, "uint32", prelude=bf16, arch="compute_90",
        ),
    ]  # fmt: skip
    return cases


def _approximate() -> list[Case]:
    generator = rng("approximate")
    positive = np.abs(bits64(generator, COUNT, 60)).astype(np.float32) + np.float32(1e-30)
    small = (generator.integers(-(1 << 20), 1 << 20, COUNT) / np.float64(1 << 16)).astype(
        np.float32
    )
    wide = small.astype(np.float64)
    return [
        elementwise("ex2_approx", 'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));', [small], "float32", ulps=4),
        elementwise("lg2_approx", 'asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(a));', [positive], "float32", ulps=4, absolute=6e-7),
        elementwise("sin_approx", "r = __sinf(a * 0.15f);", [small], "float32", ulps=4, absolute=1e-6),
        elementwise("cos_approx", "r = __cosf(a * 0.15f);", [small], "float32", ulps=4, absolute=1e-6),
        elementwise("tanh_approx", 'asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(a));', [small], "float32", ulps=9000),
        elementwise("rsqrt_approx", "r = rsqrtf(a);", [positive], "float32", ulps=4),
        elementwise("rcp_approx", 'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));', [positive], "float32", ulps=2),
        elementwise("sqrt_approx", 'asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));', [positive], "float32", ulps=4),
        elementwise("div_approx", "r = __fdividef(a, b);", [positive, positive[::-1].copy()], "float32", ulps=4),
        elementwise("div_full", 'asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));', [positive, positive[::-1].copy()], "float32", ulps=4),
        elementwise("math_f32", "r = expf(a * 0.5f) * 1e-3f + sinf(a) + logf(fabsf(a) + 1.0f) + tanhf(a) + atanf(a);", [small], "float32", ulps=64, absolute=4e-6),
        elementwise("math_f64", "r = exp(a * 0.25) * 1e-3 + sin(a) + log(fabs(a) + 1.0) + tanh(a) + cbrt(a) + pow(fabs(a) + 0.5, 1.5);", [wide], "float64", ulps=16, absolute=1e-13),
        elementwise("powers_f32", "r = powf(fabsf(a) + 0.1f, 1.7f) + cosf(a) * erff(a);", [small], "float32", ulps=32, absolute=2e-6),
    ]  # fmt: skip


def cases() -> list[Case]:
    return _arithmetic() + _conversions() + _halves() + _approximate()
