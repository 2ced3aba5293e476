// f16 and bf16 arithmetic, single and in pairs.
#include "float_format.h"

namespace phos::ptx::PHOS_ISA {
namespace {

struct Half {
    static float in(uint32_t v) { return from_f16(v & 0xffff); }
    static uint32_t out(float v) { return to_f16(v); }
    static constexpr const Format& kFormat = kF16;
    static constexpr uint32_t kExponent = 0x7c00, kOne = 0x3c00;
};
struct Brain {
    static float in(uint32_t v) { return from_bf16(v & 0xffff); }
    static uint32_t out(float v) { return to_bf16(v); }
    static constexpr const Format& kFormat = kBf16;
    static constexpr uint32_t kExponent = 0x7f80, kOne = 0x3f80;
};

template <class H>
[[gnu::always_inline]] inline uint32_t flush_half(uint32_t v) {
    return (v & H::kExponent) == 0 ? v & 0x8000 : v;
}

// Twice f16's precision and two bits more fit into f32, so rounding twice does no harm; bf16's
// subnormal products do not, and a sum of an exact product needs more than f64 has.
template <class H>
uint32_t fused(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b);  // exact
    double sum = product + static_cast<double>(c);
    const double back = sum - product;
    const double error = (product - (sum - back)) + (static_cast<double>(c) - back);
    // Round to odd: a sum that was not exact gets an odd last bit, which keeps the next rounding
    // right.
    auto bits = bits_as<uint64_t>(sum);
    if (error != 0 && error - error == 0 && !(bits & 1)) {
        const bool grows = (error > 0) == (sum > 0);
        bits = grows ? bits + 1 : bits - 1;
        sum = bits_as<double>(bits);
    }
    return narrow(sum, H::kFormat, Rounding::rn, false);
}

struct Add {
    template <class H>
    static uint32_t apply(float a, float b) {
        return H::out(a + b);
    }
};
struct Subtract {
    template <class H>
    static uint32_t apply(float a, float b) {
        return H::out(a - b);
    }
};
struct Multiply {
    template <class H>
    static uint32_t apply(float a, float b) {
        if constexpr (std::is_same_v<H, Brain>)
            return narrow(static_cast<double>(a) * static_cast<double>(b), kBf16, Rounding::rn,
                          false);
        else
            return H::out(a * b);
    }
};
struct Fma {
    template <class H>
    static uint32_t apply(float a, float b, float c) {
        return fused<H>(a, b, c);
    }
};
template <bool Least, bool Nan>
struct Extreme {
    template <class H>
    static uint32_t apply(float a, float b) {
        if (Nan && (a != a || b != b)) return kNan16;
        const auto x = bits_as<uint32_t>(a), y = bits_as<uint32_t>(b);
        const float zeros = bits_as<float>(Least ? x | y : x & y);
        const float ordered = a == b ? zeros : (Least ? a < b : a > b) ? a : b;
        return H::out(a != a ? b : b != b ? a : ordered);
    }
};

using Least = Extreme<true, false>;
using Greatest = Extreme<false, false>;
using LeastNan = Extreme<true, true>;
using GreatestNan = Extreme<false, true>;

template <class F, class H, bool Ftz, bool Sat, bool Relu>
struct One {
    template <class... V>
    static uint32_t apply(V... v) {
        uint32_t result = F::template apply<H>(H::in(Ftz ? flush_half<H>(v) : v)...);
        if (Ftz) result = flush_half<H>(result);
        const bool nan = (result & 0x7fff) > H::kExponent;
        if (Sat) {
            result = nan || (result & 0x8000) ? 0 : result > H::kOne ? H::kOne : result;
        } else if (Relu) {
            result = nan ? kNan16 : result & 0x8000 ? 0 : result;
        }
        return result;
    }
};
template <class F>
struct Pair {
    template <class... V>
    static uint32_t apply(V... v) {
        return F::apply((v & 0xffff)...) | F::apply((v >> 16)...) << 16;
    }
};

template <class H>
struct SignOps {
    struct Negate {
        static uint32_t apply(uint32_t a) { return a ^ 0x8000; }
    };
    struct Absolute {
        static uint32_t apply(uint32_t a) { return a & 0x7fff; }
    };
    template <class F>
    struct Flushed {
        static uint32_t apply(uint32_t a) { return F::apply(flush_half<H>(a)); }
    };
};

#define PHOS_VARIANTS(name, kind, F, H, suffix, wrap)                                     \
    {name "." suffix, kind<wrap<One<F, H, false, false, false>>, uint32_t>},              \
        {name "." suffix ".ftz", kind<wrap<One<F, H, true, false, false>>, uint32_t>},    \
        {name "." suffix ".sat", kind<wrap<One<F, H, false, true, false>>, uint32_t>},    \
        {name "." suffix ".ftz.sat", kind<wrap<One<F, H, true, true, false>>, uint32_t>}, \
        {name "." suffix ".relu", kind<wrap<One<F, H, false, false, true>>, uint32_t>}, { \
        name "." suffix ".ftz.relu", kind<wrap<One<F, H, true, false, true>>, uint32_t>   \
    }
template <class F>
struct Single : F {};
#define PHOS_HALF(name, kind, F)                             \
    PHOS_VARIANTS(name, kind, F, Half, "f16", Single),       \
        PHOS_VARIANTS(name, kind, F, Half, "f16x2", Pair),   \
        PHOS_VARIANTS(name, kind, F, Brain, "bf16", Single), \
        PHOS_VARIANTS(name, kind, F, Brain, "bf16x2", Pair)
#define PHOS_SIGN(name, F)                                                                      \
    {name ".f16", unary<SignOps<Half>::F, uint32_t>},                                           \
        {name ".f16.ftz", unary<SignOps<Half>::Flushed<SignOps<Half>::F>, uint32_t>},           \
        {name ".bf16", unary<SignOps<Brain>::F, uint32_t>},                                     \
        {name ".f16x2", unary<Pair<SignOps<Half>::F>, uint32_t>},                               \
        {name ".f16x2.ftz", unary<Pair<SignOps<Half>::Flushed<SignOps<Half>::F>>, uint32_t>}, { \
        name ".bf16x2", unary<Pair<SignOps<Brain>::F>, uint32_t>                                \
    }

const HandlerEntry kHandlers[] = {
    PHOS_HALF("add", binary, Add),
    PHOS_HALF("sub", binary, Subtract),
    PHOS_HALF("mul", binary, Multiply),
    PHOS_HALF("fma", ternary, Fma),
    PHOS_HALF("min", binary, Least),
    PHOS_HALF("max", binary, Greatest),
    PHOS_HALF("min.NaN", binary, LeastNan),
    PHOS_HALF("max.NaN", binary, GreatestNan),
    PHOS_SIGN("neg", Negate),
    PHOS_SIGN("abs", Absolute),
};

}  // namespace

HandlerTable half_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
