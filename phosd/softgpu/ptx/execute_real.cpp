// f32 and f64 arithmetic. Other rounding modes than .rn come from the control register, which the
// decoder sets around an operation ("rounding").
#include <cmath>

#include "float_format.h"

#ifdef __SSE__
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace phos::ptx::PHOS_ISA {
namespace {

struct Add {
    template <class T>
    static T apply(T a, T b) {
        return a + b;
    }
};
struct Subtract {
    template <class T>
    static T apply(T a, T b) {
        return a - b;
    }
};
struct Multiply {
    template <class T>
    static T apply(T a, T b) {
        return a * b;
    }
};
struct Divide {
    template <class T>
    static T apply(T a, T b) {
        return a / b;
    }
};
struct Fma {
    static float apply(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    static double apply(double a, double b, double c) { return __builtin_fma(a, b, c); }
};
struct SquareRoot {
    static float apply(float a) { return __builtin_sqrtf(a); }
    static double apply(double a) { return __builtin_sqrt(a); }
};
struct Reciprocal {
    template <class T>
    static T apply(T a) {
        return T{1} / a;
    }
};
// a * (1 / b), whose reciprocal underflows for the largest divisors.
struct DivideApprox {
    static float apply(float a, float b) {
        const uint32_t size = bits_as<uint32_t>(b) & 0x7fff'ffff;
        if (size > 0x7e80'0000 && size < 0x7f80'0000)
            return a * bits_as<float>(bits_as<uint32_t>(b) & 0x8000'0000);
        return a / b;
    }
};
struct ReciprocalRoot {
    static float apply(float a) {
        return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(a)));
    }
    static double apply(double a) { return 1.0 / __builtin_sqrt(a); }
};
// The .approx.ftz.f64 forms read and write only the upper half of the word.
[[gnu::always_inline]] inline double upper(double v) {
    return bits_as<double>(bits_as<uint64_t>(v) & 0xffff'ffff'0000'0000);
}
[[gnu::always_inline]] inline double flush_wide(double v) {
    const auto bits = bits_as<uint64_t>(v);
    return bits_as<double>((bits & 0x7ff0'0000'0000'0000) == 0 ? bits & 0x8000'0000'0000'0000
                                                               : bits);
}
template <class F>
struct Upper {
    static double apply(double a) { return upper(flush_wide(F::apply(flush_wide(upper(a))))); }
};
struct Exp2 {
    static float apply(float a) { return ::exp2f(a); }
};
struct Log2 {
    static float apply(float a) { return ::log2f(a); }
};
struct Sine {
    static float apply(float a) { return ::sinf(a); }
};
struct Cosine {
    static float apply(float a) { return ::cosf(a); }
};
struct Tanh {
    static float apply(float a) { return ::tanhf(a); }
};

template <class T>
constexpr Lane<T> kSign = Lane<T>{1} << (8 * sizeof(T) - 1);
struct Absolute {
    template <class T>
    static T apply(T a) {
        return bits_as<T>(bits_as<Lane<T>>(a) & ~kSign<T>);
    }
};
struct Negate {
    template <class T>
    static T apply(T a) {
        return bits_as<T>(bits_as<Lane<T>>(a) ^ kSign<T>);
    }
};
struct CopySign {  // the sign of a, the magnitude of b
    template <class T>
    static T apply(T a, T b) {
        return bits_as<T>((bits_as<Lane<T>>(a) & kSign<T>) | (bits_as<Lane<T>>(b) & ~kSign<T>));
    }
};
// -0 is less than +0, and a number beats a NaN.
template <bool Least>
struct Extreme {
    template <class T>
    static T apply(T a, T b) {
        const auto x = bits_as<Lane<T>>(a), y = bits_as<Lane<T>>(b);
        const T zeros = bits_as<T>(Least ? x | y : x & y);
        const T ordered = a == b ? zeros : (Least ? a < b : a > b) ? a : b;
        return a != a ? b : b != b ? a : ordered;
    }
};
template <bool Least>
struct ExtremeNan {
    template <class T>
    static T apply(T a, T b) {
        return a != a || b != b ? a + b : Extreme<Least>::apply(a, b);
    }
};
template <class F>
struct XorSignAbs {
    template <class T>
    static T apply(T a, T b) {
        const auto sign = (bits_as<Lane<T>>(a) ^ bits_as<Lane<T>>(b)) & kSign<T>;
        return bits_as<T>(bits_as<Lane<T>>(F::apply(Absolute::apply(a), Absolute::apply(b))) |
                          sign);
    }
};

template <class F, bool Ftz, bool Sat>
struct Rounded {
    template <class T>
    static T in(T v) {
        return Ftz ? flush(v) : v;
    }
    template <class T>
    static T out(T v) {
        const T flushed = Ftz ? flush(v) : v;
        return Sat ? saturate(flushed) : canonical(flushed);
    }
    template <class... T>
    static auto apply(T... v) {
        return out(F::apply(in(v)...));
    }
};
// Sign operations: flushed, but NaNs pass as they are.
template <class F, bool Ftz>
struct Plain {
    template <class T>
    static T apply(T a) {
        return F::apply(Ftz ? flush(a) : a);
    }
};

// Functions of the C library, one lane at a time.
template <class F, class T>
void each_call(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    each_active<T>(op, warp, mask, [&](unsigned i) { return F::apply(a[i]); });
}

void rounding(const Op& op, Warp&, uint32_t) {
    const auto mode = static_cast<Rounding>(op.value);
#ifdef __SSE__
    const unsigned bits = mode == Rounding::rz   ? _MM_ROUND_TOWARD_ZERO
                          : mode == Rounding::rm ? _MM_ROUND_DOWN
                          : mode == Rounding::rp ? _MM_ROUND_UP
                                                 : _MM_ROUND_NEAREST;
    _mm_setcsr((_mm_getcsr() & ~static_cast<unsigned>(_MM_ROUND_MASK)) | bits);
#else
    std::fesetround(mode == Rounding::rz   ? FE_TOWARDZERO
                    : mode == Rounding::rm ? FE_DOWNWARD
                    : mode == Rounding::rp ? FE_UPWARD
                                           : FE_TONEAREST);
#endif
}

#define PHOS_F32(name, kind, F)                                    \
    {name ".f32", kind<Rounded<F, false, false>, float>},          \
        {name ".f32.ftz", kind<Rounded<F, true, false>, float>},   \
        {name ".f32.sat", kind<Rounded<F, false, true>, float>}, { \
        name ".f32.ftz.sat", kind<Rounded<F, true, true>, float>   \
    }
#define PHOS_REAL(name, kind, F)                            \
    PHOS_F32(name, kind, F), {                              \
        name ".f64", kind<Rounded<F, false, false>, double> \
    }
#define PHOS_CALL(name, F)                                         \
    {name ".f32", each_call<Rounded<F, false, false>, float>}, {   \
        name ".f32.ftz", each_call<Rounded<F, true, false>, float> \
    }
#define PHOS_PLAIN(name, F)                                                                        \
    {name ".f32", unary<Plain<F, false>, float>}, {name ".f32.ftz", unary<Plain<F, true>, float>}, \
    {                                                                                              \
        name ".f64", unary<Plain<F, false>, double>                                                \
    }

const HandlerEntry kHandlers[] = {
    {"rounding", rounding},
    PHOS_REAL("add", binary, Add),
    PHOS_REAL("sub", binary, Subtract),
    PHOS_REAL("mul", binary, Multiply),
    PHOS_REAL("fma", ternary, Fma),
    PHOS_REAL("div", binary, Divide),
    PHOS_REAL("sqrt", unary, SquareRoot),
    PHOS_REAL("rcp", unary, Reciprocal),
    PHOS_F32("div.approx", binary, DivideApprox),
    PHOS_REAL("rsqrt", unary, ReciprocalRoot),
    {"rcp.approx.f64", unary<Upper<Reciprocal>, double>},
    {"rsqrt.approx.f64", unary<Upper<ReciprocalRoot>, double>},
    PHOS_CALL("ex2", Exp2),
    PHOS_CALL("lg2", Log2),
    PHOS_CALL("sin", Sine),
    PHOS_CALL("cos", Cosine),
    PHOS_CALL("tanh", Tanh),
    PHOS_PLAIN("abs", Absolute),
    PHOS_PLAIN("neg", Negate),
    {"copysign.f32", binary<CopySign, float>},
    {"copysign.f64", binary<CopySign, double>},
    PHOS_REAL("min", binary, Extreme<true>),
    PHOS_REAL("max", binary, Extreme<false>),
    PHOS_F32("min.NaN", binary, ExtremeNan<true>),
    PHOS_F32("max.NaN", binary, ExtremeNan<false>),
    PHOS_F32("min.xorsign.abs", binary, XorSignAbs<Extreme<true>>),
    PHOS_F32("max.xorsign.abs", binary, XorSignAbs<Extreme<false>>),
    PHOS_F32("min.NaN.xorsign.abs", binary, XorSignAbs<ExtremeNan<true>>),
    PHOS_F32("max.NaN.xorsign.abs", binary, XorSignAbs<ExtremeNan<false>>),
};

}  // namespace

HandlerTable real_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
