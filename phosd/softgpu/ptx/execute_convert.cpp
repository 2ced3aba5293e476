// cvt: between every pair of types.
#include "float_format.h"

namespace phos::ptx::PHOS_ISA {
namespace {

template <class To>
struct ToInteger {
    template <class From>
    static To apply(From v) {
        return static_cast<To>(v);
    }
};

template <class T>
constexpr T kLeast = std::is_signed_v<T> ? static_cast<T>(T{1} << (8 * sizeof(T) - 1)) : T{0};
template <class T>
constexpr T kMost = static_cast<T>(~kLeast<T>);

// Clamped to the range of To.
template <class To>
struct Clamp {
    template <class From>
    static To apply(From v) {
        if constexpr (std::is_signed_v<From>) {
            if (v < 0) {
                if constexpr (std::is_signed_v<To>)
                    return int64_t{v} < int64_t{kLeast<To>} ? kLeast<To> : static_cast<To>(v);
                else
                    return 0;
            }
        }
        return static_cast<uint64_t>(v) > static_cast<uint64_t>(kMost<To>) ? kMost<To>
                                                                           : static_cast<To>(v);
    }
};

[[gnu::always_inline]] inline float rounded(float v, Rounding mode) {
    return mode == Rounding::rz   ? __builtin_truncf(v)
           : mode == Rounding::rm ? __builtin_floorf(v)
           : mode == Rounding::rp ? __builtin_ceilf(v)
                                  : __builtin_nearbyintf(v);
}
[[gnu::always_inline]] inline double rounded(double v, Rounding mode) {
    return mode == Rounding::rz   ? __builtin_trunc(v)
           : mode == Rounding::rm ? __builtin_floor(v)
           : mode == Rounding::rp ? __builtin_ceil(v)
                                  : __builtin_nearbyint(v);
}

// Out of range clamps. A NaN gives 0, but the smallest number from f64 or to 64 bits.
template <class To, class From>
[[gnu::always_inline]] inline To integer_of(From v) {
    // The first value beyond the range is a power of two, so exact in From.
    constexpr From beyond = static_cast<From>(
        2.0 * static_cast<double>(1ull << (8 * sizeof(To) - (std::is_signed_v<To> ? 2 : 1))));
    constexpr From least = static_cast<From>(kLeast<To>);
    constexpr To nan = sizeof(To) == 8                        ? static_cast<To>(1ull << 63)
                       : sizeof(From) == 8 && sizeof(To) == 4 ? static_cast<To>(1u << 31)
                                                              : To{0};
    if (v != v) return nan;
    if (v >= beyond) return kMost<To>;
    if (v < least) return kLeast<To>;
    return static_cast<To>(v);
}

// op.value: the rounding, and in bit 8 whether subnormal inputs are flushed.
template <class To, class From>
void real_to_integer(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<From>(warp, op.a);
    const bool ftz = op.value >> 8 & 1;
    const auto convert = [&](auto mode) {
        each<To>(op, warp, mask, [&](unsigned i) {
            const From v = ftz ? flush(a[i]) : a[i];
            return integer_of<To>(rounded(v, decltype(mode)::value));
        });
    };
    switch (static_cast<Rounding>(op.value & 0xff)) {
        case Rounding::rz:
            return convert(std::integral_constant<Rounding, Rounding::rz>{});
        case Rounding::rm:
            return convert(std::integral_constant<Rounding, Rounding::rm>{});
        case Rounding::rp:
            return convert(std::integral_constant<Rounding, Rounding::rp>{});
        default:
            return convert(std::integral_constant<Rounding, Rounding::rn>{});
    }
}

template <class T>
void real_to_integral(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    const auto mode = static_cast<Rounding>(op.value & 0xff);
    const bool ftz = op.value >> 8 & 1;
    each<T>(op, warp, mask,
            [&](unsigned i) { return canonical(rounded(ftz ? flush(a[i]) : a[i], mode)); });
}

struct ToFloat {
    template <class From>
    static float apply(From v) {
        return static_cast<float>(v);
    }
};
struct ToDouble {
    template <class From>
    static double apply(From v) {
        return static_cast<double>(v);
    }
};
// The f64 nearest to a 64-bit integer with the last bit as a sticky one, fit to be rounded again.
struct ToDoubleOdd {
    static double apply(uint64_t v) {
        if (v >> 53) v = (v >> 11 | ((v & 0x7ff) != 0)) << 11;
        return static_cast<double>(v);
    }
    static double apply(int64_t v) {
        return v < 0 ? -apply(0 - static_cast<uint64_t>(v)) : apply(static_cast<uint64_t>(v));
    }
};

template <bool Ftz>
struct Widen {
    static double apply(float v) { return static_cast<double>(Ftz ? flush(v) : v); }
};
template <bool Ftz>
struct Shorten {
    static float apply(double v) {
        const float r = canonical(static_cast<float>(v));
        return Ftz ? flush(r) : r;
    }
};
template <bool Ftz>
struct Same {
    template <class T>
    static T apply(T v) {
        return canonical(Ftz ? flush(v) : v);
    }
};
struct Saturate {
    template <class T>
    static T apply(T v) {
        return saturate(v);
    }
};

// op.value: rounding, bit 8: finite, bit 9: relu.
template <class From, const Format& To>
void to_format(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<From>(warp, op.a);
    const auto mode = static_cast<Rounding>(op.value & 0xff);
    const bool finite = op.value >> 8 & 1, relu = op.value >> 9 & 1;
    each_active<uint32_t>(op, warp, mask, [&](unsigned i) {
        const From v = relu && a[i] < From{0} ? From{0} : a[i];
        const uint32_t bits = narrow(static_cast<double>(v), To, mode, finite);
        return relu && bits == To.sign ? 0u : bits;
    });
}
struct NearestHalf {
    static uint32_t apply(float v) { return to_f16(v); }
};
struct NearestBrain {
    static uint32_t apply(float v) { return to_bf16(v); }
};
struct FromHalf {
    static float apply(uint32_t v) { return canonical(from_f16(v & 0xffff)); }
};
struct FromBrain {
    static float apply(uint32_t v) { return canonical(from_bf16(v & 0xffff)); }
};
struct FromE4m3 {
    static float apply(uint32_t v) { return from_e4m3(v & 0xff); }
};
struct FromE5m2 {
    static float apply(uint32_t v) { return from_e5m2(v & 0xff); }
};

#define PHOS_ONE(prefix, F, to, To, from, From) {prefix to "." from, unary<F<To>, To, From>}
#define PHOS_FROM_ALL(prefix, F, to, To)                                                           \
    PHOS_ONE(prefix, F, to, To, "u8", uint8_t), PHOS_ONE(prefix, F, to, To, "s8", int8_t),         \
        PHOS_ONE(prefix, F, to, To, "u16", uint16_t), PHOS_ONE(prefix, F, to, To, "s16", int16_t), \
        PHOS_ONE(prefix, F, to, To, "u32", uint32_t), PHOS_ONE(prefix, F, to, To, "s32", int32_t), \
        PHOS_ONE(prefix, F, to, To, "u64", uint64_t), PHOS_ONE(prefix, F, to, To, "s64", int64_t)
#define PHOS_INTEGERS(prefix, F)                                                             \
    PHOS_FROM_ALL(prefix, F, "u8", uint8_t), PHOS_FROM_ALL(prefix, F, "s8", int8_t),         \
        PHOS_FROM_ALL(prefix, F, "u16", uint16_t), PHOS_FROM_ALL(prefix, F, "s16", int16_t), \
        PHOS_FROM_ALL(prefix, F, "u32", uint32_t), PHOS_FROM_ALL(prefix, F, "s32", int32_t), \
        PHOS_FROM_ALL(prefix, F, "u64", uint64_t), PHOS_FROM_ALL(prefix, F, "s64", int64_t)
#define PHOS_REALS(name, T)                               \
    {"cvt." name ".f32", real_to_integer<T, float>},      \
        {"cvt." name ".f64", real_to_integer<T, double>}, \
        {"cvt.f32." name, unary<ToFloat, float, T>}, {    \
        "cvt.f64." name, unary<ToDouble, double, T>       \
    }
#define PHOS_FORMAT(name, format)                        \
    {"narrow." name ".f32", to_format<float, format>}, { \
        "narrow." name ".f64", to_format<double, format> \
    }

const HandlerEntry kHandlers[] = {
    PHOS_INTEGERS("cvt.", ToInteger),
    PHOS_INTEGERS("cvt.sat.", Clamp),
    PHOS_REALS("u8", uint8_t),
    PHOS_REALS("s8", int8_t),
    PHOS_REALS("u16", uint16_t),
    PHOS_REALS("s16", int16_t),
    PHOS_REALS("u32", uint32_t),
    PHOS_REALS("s32", int32_t),
    PHOS_REALS("u64", uint64_t),
    PHOS_REALS("s64", int64_t),
    {"odd.f64.u64", unary<ToDoubleOdd, double, uint64_t>},
    {"odd.f64.s64", unary<ToDoubleOdd, double, int64_t>},
    {"cvt.f64.f32", unary<Widen<false>, double, float>},
    {"cvt.f64.f32.ftz", unary<Widen<true>, double, float>},
    {"cvt.f32.f64", unary<Shorten<false>, float, double>},
    {"cvt.f32.f64.ftz", unary<Shorten<true>, float, double>},
    {"cvt.f32.f32", unary<Same<false>, float>},
    {"cvt.f32.f32.ftz", unary<Same<true>, float>},
    {"cvt.f64.f64", unary<Same<false>, double>},
    {"integral.f32", real_to_integral<float>},
    {"integral.f64", real_to_integral<double>},
    {"saturate.f32", unary<Saturate, float>},
    {"saturate.f64", unary<Saturate, double>},
    PHOS_FORMAT("f16", kF16),
    PHOS_FORMAT("bf16", kBf16),
    PHOS_FORMAT("tf32", kTf32),
    PHOS_FORMAT("e4m3", kE4m3),
    PHOS_FORMAT("e5m2", kE5m2),
    {"cvt.f16.f32", unary<NearestHalf, uint32_t, float>},
    {"cvt.bf16.f32", unary<NearestBrain, uint32_t, float>},
    {"cvt.f32.f16", unary<FromHalf, float, uint32_t>},
    {"cvt.f32.bf16", unary<FromBrain, float, uint32_t>},
    {"cvt.f32.e4m3", unary<FromE4m3, float, uint32_t>},
    {"cvt.f32.e5m2", unary<FromE5m2, float, uint32_t>},
};

}  // namespace

HandlerTable convert_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
