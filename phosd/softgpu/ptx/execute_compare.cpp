// Comparison, selection, and the tests of testp.
#include "float_format.h"

namespace phos::ptx::PHOS_ISA {
namespace {

struct Eq {
    template <class T>
    static bool apply(T a, T b) {
        return a == b;
    }
};
struct Ne {
    template <class T>
    static bool apply(T a, T b) {
        return a != b;
    }
};
struct Lt {
    template <class T>
    static bool apply(T a, T b) {
        return a < b;
    }
};
struct Le {
    template <class T>
    static bool apply(T a, T b) {
        return a <= b;
    }
};
struct Gt {
    template <class T>
    static bool apply(T a, T b) {
        return a > b;
    }
};
struct Ge {
    template <class T>
    static bool apply(T a, T b) {
        return a >= b;
    }
};
struct Num {
    template <class T>
    static bool apply(T a, T b) {
        return a == a && b == b;
    }
};
struct Nan {
    template <class T>
    static bool apply(T a, T b) {
        return a != a || b != b;
    }
};
// `ne` is ordered: false for a NaN, unlike the C operator.
struct NeOrdered {
    template <class T>
    static bool apply(T a, T b) {
        return a < b || a > b;
    }
};
template <class F>
struct OrNan {
    template <class T>
    static bool apply(T a, T b) {
        return Nan::apply(a, b) || F::apply(a, b);
    }
};

template <class F, class T, bool Ftz = false>
void compare(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    const auto b = read<T>(warp, op.b);
    set_predicate(warp, op.d, mask, test_lanes([&](unsigned i) {
                      if constexpr (Ftz)
                          return F::apply(flush(a[i]), flush(b[i]));
                      else
                          return F::apply(a[i], b[i]);
                  }));
}

enum class Combine { none, both, either, differ };
// p = (a cmp b) op c and q = !(a cmp b) op c, from the comparison's result at op.a: op.b is c,
// op.c is q's slot; op.value holds the operation, and in bit 8 whether c is negated.
void combine(const Op& op, Warp& warp, uint32_t mask) {
    const uint32_t test = *warp.slot<uint32_t>(op.a);
    const uint32_t c = *warp.slot<uint32_t>(op.b) ^ (op.value >> 8 & 1 ? kAllLanes : 0);
    const auto merged = [&](uint32_t left) {
        switch (static_cast<Combine>(op.value & 0xff)) {
            case Combine::both:
                return left & c;
            case Combine::either:
                return left | c;
            case Combine::differ:
                return left ^ c;
            default:
                return left;
        }
    };
    set_predicate(warp, op.d, mask, merged(test));
    set_predicate(warp, op.c, mask, merged(~test));
}

template <class T>
void select(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    const auto b = read<T>(warp, op.b);
    const uint32_t chosen = *warp.slot<uint32_t>(op.c) ^ static_cast<uint32_t>(op.value);
    each<T>(op, warp, mask, [&](unsigned i) { return chosen >> i & 1 ? a[i] : b[i]; });
}

template <class T>
constexpr Lane<T> kExponentBits = sizeof(T) == 8 ? static_cast<Lane<T>>(0x7ff0'0000'0000'0000)
                                                 : static_cast<Lane<T>>(0x7f80'0000);
template <class T>
[[gnu::always_inline]] inline Lane<T> magnitude(T v) {
    return bits_as<Lane<T>>(v) & ~(Lane<T>{1} << (8 * sizeof(T) - 1));
}
struct Finite {
    template <class T>
    static bool apply(T v) {
        return magnitude(v) < kExponentBits<T>;
    }
};
struct Infinite {
    template <class T>
    static bool apply(T v) {
        return magnitude(v) == kExponentBits<T>;
    }
};
struct Number {
    template <class T>
    static bool apply(T v) {
        return magnitude(v) <= kExponentBits<T>;
    }
};
struct NotANumber {
    template <class T>
    static bool apply(T v) {
        return magnitude(v) > kExponentBits<T>;
    }
};
// Zero counts as normal for testp.
struct Normal {
    template <class T>
    static bool apply(T v) {
        const auto exponent = magnitude(v) & kExponentBits<T>;
        return magnitude(v) == 0 || (exponent != 0 && exponent != kExponentBits<T>);
    }
};
struct Subnormal {
    template <class T>
    static bool apply(T v) {
        return magnitude(v) != 0 && (magnitude(v) & kExponentBits<T>) == 0;
    }
};

template <class F, class T>
void test(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    set_predicate(warp, op.d, mask, test_lanes([&](unsigned i) { return F::apply(a[i]); }));
}

#define PHOS_EQUAL(name, F)                                                     \
    {name ".b16", compare<F, uint16_t>}, {name ".b32", compare<F, uint32_t>}, { \
        name ".b64", compare<F, uint64_t>                                       \
    }
#define PHOS_ORDER(name, F)                                                      \
    {name ".b16", compare<F, uint16_t>}, {name ".b32", compare<F, uint32_t>},    \
        {name ".b64", compare<F, uint64_t>}, {name ".s16", compare<F, int16_t>}, \
        {name ".s32", compare<F, int32_t>}, {                                    \
        name ".s64", compare<F, int64_t>                                         \
    }
#define PHOS_REAL(name, F)                                                          \
    {name ".f32", compare<F, float>}, {name ".f32.ftz", compare<F, float, true>}, { \
        name ".f64", compare<F, double>                                             \
    }
#define PHOS_TEST(name, F)                    \
    {"testp." name ".f32", test<F, float>}, { \
        "testp." name ".f64", test<F, double> \
    }

const HandlerEntry kHandlers[] = {
    PHOS_EQUAL("setp.eq", Eq),
    PHOS_EQUAL("setp.ne", Ne),
    PHOS_ORDER("setp.lt", Lt),
    PHOS_ORDER("setp.le", Le),
    PHOS_ORDER("setp.gt", Gt),
    PHOS_ORDER("setp.ge", Ge),
    PHOS_REAL("setp.eq", Eq),
    PHOS_REAL("setp.ne", NeOrdered),
    PHOS_REAL("setp.lt", Lt),
    PHOS_REAL("setp.le", Le),
    PHOS_REAL("setp.gt", Gt),
    PHOS_REAL("setp.ge", Ge),
    PHOS_REAL("setp.equ", OrNan<Eq>),
    PHOS_REAL("setp.neu", OrNan<Ne>),
    PHOS_REAL("setp.ltu", OrNan<Lt>),
    PHOS_REAL("setp.leu", OrNan<Le>),
    PHOS_REAL("setp.gtu", OrNan<Gt>),
    PHOS_REAL("setp.geu", OrNan<Ge>),
    PHOS_REAL("setp.num", Num),
    PHOS_REAL("setp.nan", Nan),
    {"combine", combine},
    {"selp.b32", select<uint32_t>},
    {"selp.b64", select<uint64_t>},
    PHOS_TEST("finite", Finite),
    PHOS_TEST("infinite", Infinite),
    PHOS_TEST("number", Number),
    PHOS_TEST("notanumber", NotANumber),
    PHOS_TEST("normal", Normal),
    PHOS_TEST("subnormal", Subnormal),
};

}  // namespace

HandlerTable compare_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
