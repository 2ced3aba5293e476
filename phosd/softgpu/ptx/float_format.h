// Floating point as the device does it: flushing, canonical NaNs, formats narrower than f32.
#pragma once

#include "execute.h"

namespace phos::ptx::PHOS_ISA {
namespace {

constexpr uint32_t kNan32 = 0x7fff'ffff;  // what every f32 operation gives for a NaN
constexpr uint16_t kNan16 = 0x7fff;       // the same for f16 and bf16

[[gnu::always_inline]] inline float flush(float v) {
    const auto bits = bits_as<uint32_t>(v);
    return bits_as<float>((bits & 0x7f80'0000) == 0 ? bits & 0x8000'0000 : bits);
}
[[gnu::always_inline]] inline double flush(double v) {
    return v;
}

[[gnu::always_inline]] inline float canonical(float v) {
    return bits_as<float>(v != v ? kNan32 : bits_as<uint32_t>(v));
}
// f64 keeps the payload of its operand, as x86 does.
[[gnu::always_inline]] inline double canonical(double v) {
    return v;
}

template <class T>
[[gnu::always_inline]] inline T saturate(T v) {
    return v > T{0} ? (v < T{1} ? v : T{1}) : T{0};  // a NaN gives +0
}

struct Format {
    int mantissa;     // explicit bits
    int least;        // exponent of the smallest normal number
    uint32_t finite;  // the largest finite value's bits
    uint32_t infinity;
    uint32_t nan;
    int shift;  // where the bits stand in the register
    uint32_t sign;
};
constexpr Format kF16{10, -14, 0x7bff, 0x7c00, kNan16, 0, 0x8000};
constexpr Format kBf16{7, -126, 0x7f7f, 0x7f80, kNan16, 0, 0x8000};
constexpr Format kTf32{10, -126, 0x3fbff, 0x3fc00, 0x3ffff, 13, 0x8000'0000};
constexpr Format kE4m3{3, -6, 0x7e, 0x7f, 0x7f, 0, 0x80};
constexpr Format kE5m2{2, -14, 0x7b, 0x7c, 0x7f, 0, 0x80};

// Rounds once from f64, into which every narrower format fits.
inline uint32_t narrow(double value, const Format& format, Rounding rounding, bool finite) {
    if (value != value) return format.nan << format.shift;
    const auto bits = bits_as<uint64_t>(value);
    const bool negative = bits >> 63;
    const uint32_t sign = negative ? format.sign : 0;
    const int biased = static_cast<int>(bits >> 52 & 0x7ff);
    const bool infinite = biased == 0x7ff;
    if (biased == 0 && (bits << 1) == 0) return sign;
    const int exponent = (biased ? biased : 1) - 1023;
    const uint64_t mantissa = (bits & 0xf'ffff'ffff'ffff) | (biased ? 1ull << 52 : 0);
    const bool normal = exponent >= format.least;
    int shift = 52 - format.mantissa + (normal ? 0 : format.least - exponent);
    if (shift > 62) shift = 62;
    uint64_t kept = mantissa >> shift;
    const uint64_t rest = mantissa & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    bool up = false;
    switch (rounding) {
        case Rounding::rz:
            break;
        case Rounding::rm:
            up = negative && rest;
            break;
        case Rounding::rp:
            up = !negative && rest;
            break;
        case Rounding::rna:
            up = rest >= half;
            break;
        default:
            up = rest > half || (rest == half && (kept & 1));
            break;
    }
    kept += up;
    const uint64_t base =
        normal ? static_cast<uint64_t>(exponent - format.least) << format.mantissa : 0;
    uint64_t result = base + kept;
    if (infinite || result > format.finite) {
        const bool outward = infinite || rounding == Rounding::rn || rounding == Rounding::rna ||
                             rounding == Rounding::none ||
                             rounding == (negative ? Rounding::rm : Rounding::rp);
        result = outward && !finite ? format.infinity : format.finite;
    }
    return static_cast<uint32_t>(result << format.shift) | sign;
}

[[gnu::always_inline]] inline float from_f16(uint32_t half) {
    const uint32_t magnitude = half & 0x7fff;
    // Scaling by 2^112 rebiases the exponent and makes subnormals right.
    const float scaled = bits_as<float>(magnitude << 13) * bits_as<float>(0x7780'0000u);
    const uint32_t bits =
        magnitude >= 0x7c00 ? 0x7f80'0000 | magnitude << 13 : bits_as<uint32_t>(scaled);
    return bits_as<float>(bits | (half & 0x8000) << 16);
}
[[gnu::always_inline]] inline float from_bf16(uint32_t half) {
    return bits_as<float>(half << 16);
}

// Round to nearest even, without a branch.
[[gnu::always_inline]] inline uint32_t to_f16(float v) {
    const auto bits = bits_as<uint32_t>(v);
    const uint32_t magnitude = bits & 0x7fff'ffff, sign = bits >> 16 & 0x8000;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    // 0.5 has f16's subnormal spacing as its unit in the last place.
    const uint32_t tiny = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f00'0000;
    uint32_t result = magnitude < 0x3880'0000 ? tiny : normal;
    result = magnitude >= 0x477f'f000 ? 0x7c00 : result;
    result |= sign;
    return magnitude > 0x7f80'0000 ? uint32_t{kNan16} : result;
}
[[gnu::always_inline]] inline uint32_t to_bf16(float v) {
    const auto bits = bits_as<uint32_t>(v);
    const uint32_t result = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fff'ffff) > 0x7f80'0000 ? uint32_t{kNan16} : result;
}

inline float from_e4m3(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7f;
    if (magnitude == 0x7f) return bits_as<float>(kNan32);
    const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0.001953125f
                                      : bits_as<float>((magnitude << 20) + (120u << 23));
    return bits & 0x80 ? -value : value;
}
inline float from_e5m2(uint32_t bits) {
    return from_f16(bits << 8);
}

}  // namespace
}  // namespace phos::ptx::PHOS_ISA
