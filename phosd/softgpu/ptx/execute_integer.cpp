// Integer arithmetic. Names ending in .bN serve both signs.
#include "execute.h"
#include "wide.h"

namespace phos::ptx::PHOS_ISA {
namespace {

// Wrapping arithmetic on unsigned values at least as wide as int.
[[gnu::always_inline]] inline uint32_t sum(uint16_t a, uint16_t b) {
    return uint32_t{a} + b;
}
[[gnu::always_inline]] inline uint32_t sum(uint32_t a, uint32_t b) {
    return a + b;
}
[[gnu::always_inline]] inline uint64_t sum(uint64_t a, uint64_t b) {
    return a + b;
}

[[gnu::always_inline]] inline int32_t clamp32(int64_t v) {
    return static_cast<int32_t>(v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v);
}

struct Add {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(sum(a, b));
    }
};
struct Subtract {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(sum(a, static_cast<T>(~b)) + 1);
    }
};
struct AddSat {
    static int32_t apply(int32_t a, int32_t b) { return clamp32(int64_t{a} + b); }
};
struct SubtractSat {
    static int32_t apply(int32_t a, int32_t b) { return clamp32(int64_t{a} - b); }
};
struct MulLow {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(static_cast<decltype(sum(a, b))>(a) * b);
    }
};
struct MulHigh {
    template <class T>
    static T apply(T a, T b) {
        return high(a, b);
    }
};
struct MulWide {
    template <class T>
    static Wider<T> apply(T a, T b) {
        return product(a, b);
    }
};
struct MadLow {
    template <class T>
    static T apply(T a, T b, T c) {
        return Add::apply(MulLow::apply(a, b), c);
    }
};
struct MadHigh {
    template <class T>
    static T apply(T a, T b, T c) {
        return static_cast<T>(static_cast<Unsigned<T>>(high(a, b)) + static_cast<Unsigned<T>>(c));
    }
};
struct MadHighSat {
    static int32_t apply(int32_t a, int32_t b, int32_t c) {
        return clamp32(int64_t{high(a, b)} + c);
    }
};
struct MadWide {
    template <class T>
    static Wider<T> apply(T a, T b, Wider<T> c) {
        using U = Unsigned<Wider<T>>;
        return static_cast<Wider<T>>(static_cast<U>(product(a, b)) + static_cast<U>(c));
    }
};
[[gnu::always_inline]] inline int64_t low24(int32_t v) {
    return static_cast<int32_t>(static_cast<uint32_t>(v) << 8) >> 8;
}
[[gnu::always_inline]] inline uint64_t low24(uint32_t v) {
    return v & 0xffffff;
}
struct Mul24Low {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(low24(a) * low24(b));
    }
};
struct Mul24High {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>((low24(a) * low24(b)) >> 16);
    }
};
struct Mad24Low {
    template <class T>
    static T apply(T a, T b, T c) {
        return static_cast<T>(static_cast<uint32_t>(Mul24Low::apply(a, b)) +
                              static_cast<uint32_t>(c));
    }
};
struct Mad24High {
    template <class T>
    static T apply(T a, T b, T c) {
        return static_cast<T>(static_cast<uint32_t>(Mul24High::apply(a, b)) +
                              static_cast<uint32_t>(c));
    }
};
struct Mad24HighSat {
    static int32_t apply(int32_t a, int32_t b, int32_t c) {
        return clamp32(int64_t{Mul24High::apply(a, b)} + c);
    }
};
// c + |a - b|, wrapping.
struct Sad {
    template <class T>
    static T apply(T a, T b, T c) {
        using U = Unsigned<T>;
        const U difference = a < b ? static_cast<U>(static_cast<U>(b) - static_cast<U>(a))
                                   : static_cast<U>(static_cast<U>(a) - static_cast<U>(b));
        return static_cast<T>(difference + static_cast<U>(c));
    }
};
// Division by zero is undefined in PTX; the devices give all ones, and the dividend as remainder.
struct Divide {
    template <class T>
    static T apply(T a, T b) {
        if (b == 0) return static_cast<T>(-1);
        if (std::is_signed_v<T> && b == static_cast<T>(-1))
            return static_cast<T>(0 - static_cast<Unsigned<T>>(a));
        return static_cast<T>(a / b);
    }
};
struct Remainder {
    template <class T>
    static T apply(T a, T b) {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
        return static_cast<T>(a % b);
    }
};
struct Absolute {
    template <class T>
    static T apply(T a) {
        return a < 0 ? static_cast<T>(0 - static_cast<Unsigned<T>>(a)) : a;
    }
};
struct Negate {
    template <class T>
    static T apply(T a) {
        return static_cast<T>(0 - static_cast<Unsigned<T>>(a));
    }
};
struct Minimum {
    template <class T>
    static T apply(T a, T b) {
        return a < b ? a : b;
    }
};
struct Maximum {
    template <class T>
    static T apply(T a, T b) {
        return a > b ? a : b;
    }
};
template <class F>
struct Relu {
    template <class T>
    static T apply(T a, T b) {
        return Maximum::apply(F::apply(a, b), T{0});
    }
};
// The same on the two 16-bit halves of a register; T is the type of a half.
template <class F, class T>
struct Halves {
    static uint32_t apply(uint32_t a, uint32_t b) {
        const auto low = static_cast<uint16_t>(F::apply(static_cast<T>(a), static_cast<T>(b)));
        const auto top =
            static_cast<uint16_t>(F::apply(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
        return low | uint32_t{top} << 16;
    }
};

template <class T>
[[gnu::always_inline]] inline T byte_of(uint32_t word, unsigned i) {
    return static_cast<T>(word >> (8 * i));
}
// Dot products of bytes: A and B are the signs of the two operands.
template <class A, class B>
struct Dot4 {
    static int32_t apply(uint32_t a, uint32_t b, uint32_t c) {
        for (unsigned i = 0; i < 4; ++i)
            c += static_cast<uint32_t>(int32_t{byte_of<A>(a, i)} * int32_t{byte_of<B>(b, i)});
        return static_cast<int32_t>(c);
    }
};
template <class A, class B, unsigned Half>
struct Dot2 {
    static int32_t apply(uint32_t a, uint32_t b, uint32_t c) {
        using Word = std::conditional_t<std::is_signed_v<A>, int16_t, uint16_t>;
        for (unsigned i = 0; i < 2; ++i)
            c += static_cast<uint32_t>(int32_t{static_cast<Word>(a >> (16 * i))} *
                                       int32_t{byte_of<B>(b, 2 * Half + i)});
        return static_cast<int32_t>(c);
    }
};

template <class F, class T>
void divide(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    const auto b = read<T>(warp, op.b);
    each_active<T>(op, warp, mask, [&](unsigned i) { return F::apply(a[i], b[i]); });
}

// add.cc and its family: the carry of each lane lives in the predicate at op.value.
template <class T, bool Subtracts, bool In, bool Out>
void carry(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    const auto b = read<T>(warp, op.b);
    const auto slot = static_cast<uint32_t>(op.value);
    const uint32_t in = In ? *warp.slot<uint32_t>(slot) : Subtracts ? kAllLanes : 0;
    uint32_t out = 0;
    T results[kLanes];
    for (unsigned i = 0; i < kLanes; ++i) {
        const T left = a[i], right = Subtracts ? ~b[i] : b[i];
        const T partial = left + right, total = partial + (in >> i & 1);
        out |= static_cast<uint32_t>((partial < left) | (total < partial)) << i;
        results[i] = total;
    }
    each<T>(op, warp, mask, [&](unsigned i) { return results[i]; });
    if (Out) set_predicate(warp, slot, mask, out);
}

// mad.lo/hi.cc and madc: the product's half enters the same carry chain.
template <class T, bool High, bool In, bool Out>
void mad_carry(const Op& op, Warp& warp, uint32_t mask) {
    using U = Unsigned<T>;
    const auto a = read<T>(warp, op.a);
    const auto b = read<T>(warp, op.b);
    const auto c = read<U>(warp, op.c);
    const auto slot = static_cast<uint32_t>(op.value);
    const uint32_t in = In ? *warp.slot<uint32_t>(slot) : 0;
    uint32_t out = 0;
    U results[kLanes];
    for (unsigned i = 0; i < kLanes; ++i) {
        const U left = High ? static_cast<U>(high(a[i], b[i]))
                            : MulLow::apply(static_cast<U>(a[i]), static_cast<U>(b[i]));
        const U partial = left + c[i], total = partial + (in >> i & 1);
        out |= static_cast<uint32_t>((partial < left) | (total < partial)) << i;
        results[i] = total;
    }
    each<U>(op, warp, mask, [&](unsigned i) { return results[i]; });
    if (Out) set_predicate(warp, slot, mask, out);
}

#define PHOS_UNSIGNED(name, kind, F)                                      \
    {name ".b16", kind<F, uint16_t>}, {name ".b32", kind<F, uint32_t>}, { \
        name ".b64", kind<F, uint64_t>                                    \
    }
#define PHOS_SIGNED(name, kind, F)                                      \
    {name ".s16", kind<F, int16_t>}, {name ".s32", kind<F, int32_t>}, { \
        name ".s64", kind<F, int64_t>                                   \
    }
#define PHOS_BOTH(name, kind, F)                                        \
    {name ".u16", kind<F, uint16_t>}, {name ".u32", kind<F, uint32_t>}, \
        {name ".u64", kind<F, uint64_t>}, PHOS_SIGNED(name, kind, F)
#define PHOS_BOTH32(name, kind, F)      \
    {name ".u32", kind<F, uint32_t>}, { \
        name ".s32", kind<F, int32_t>   \
    }
#define PHOS_HALVES(name, F)                                  \
    {name ".u16x2", binary<Halves<F, uint16_t>, uint32_t>}, { \
        name ".s16x2", binary<Halves<F, int16_t>, uint32_t>   \
    }
#define PHOS_DOT(name, F)                                                                        \
    {name ".u32.u32", ternary<F(uint8_t, uint8_t), int32_t, uint32_t, uint32_t, uint32_t>},      \
        {name ".s32.u32", ternary<F(int8_t, uint8_t), int32_t, uint32_t, uint32_t, uint32_t>},   \
        {name ".u32.s32", ternary<F(uint8_t, int8_t), int32_t, uint32_t, uint32_t, uint32_t>}, { \
        name ".s32.s32", ternary<F(int8_t, int8_t), int32_t, uint32_t, uint32_t, uint32_t>       \
    }
#define PHOS_DOT4(A, B) Dot4<A, B>
#define PHOS_DOT2_LOW(A, B) Dot2<A, B, 0>
#define PHOS_DOT2_HIGH(A, B) Dot2<A, B, 1>
#define PHOS_CARRY(name, sub, in, out)              \
    {name ".b32", carry<uint32_t, sub, in, out>}, { \
        name ".b64", carry<uint64_t, sub, in, out>  \
    }
#define PHOS_MAD_CARRY(name, T, high, suffix)                         \
    {"mad." name ".cc." suffix, mad_carry<T, high, false, true>},     \
        {"madc." name "." suffix, mad_carry<T, high, true, false>}, { \
        "madc." name ".cc." suffix, mad_carry<T, high, true, true>    \
    }

const HandlerEntry kHandlers[] = {
    PHOS_UNSIGNED("add", binary, Add),
    PHOS_UNSIGNED("sub", binary, Subtract),
    {"add.sat.s32", binary<AddSat, int32_t>},
    {"sub.sat.s32", binary<SubtractSat, int32_t>},
    {"add.b16x2", binary<Halves<Add, uint16_t>, uint32_t>},
    PHOS_UNSIGNED("mul.lo", binary, MulLow),
    PHOS_BOTH("mul.hi", binary, MulHigh),
    {"mul.wide.u16", binary<MulWide, uint32_t, uint16_t>},
    {"mul.wide.s16", binary<MulWide, int32_t, int16_t>},
    {"mul.wide.u32", binary<MulWide, uint64_t, uint32_t>},
    {"mul.wide.s32", binary<MulWide, int64_t, int32_t>},
    PHOS_BOTH32("mul24.lo", binary, Mul24Low),
    PHOS_BOTH32("mul24.hi", binary, Mul24High),
    PHOS_UNSIGNED("mad.lo", ternary, MadLow),
    PHOS_BOTH("mad.hi", ternary, MadHigh),
    {"mad.hi.sat.s32", ternary<MadHighSat, int32_t>},
    {"mad.wide.u16", ternary<MadWide, uint32_t, uint16_t>},
    {"mad.wide.s16", ternary<MadWide, int32_t, int16_t>},
    {"mad.wide.u32", ternary<MadWide, uint64_t, uint32_t>},
    {"mad.wide.s32", ternary<MadWide, int64_t, int32_t>},
    PHOS_BOTH32("mad24.lo", ternary, Mad24Low),
    PHOS_BOTH32("mad24.hi", ternary, Mad24High),
    {"mad24.hi.sat.s32", ternary<Mad24HighSat, int32_t>},
    PHOS_BOTH("sad", ternary, Sad),
    PHOS_BOTH("div", divide, Divide),
    PHOS_BOTH("rem", divide, Remainder),
    PHOS_SIGNED("abs", unary, Absolute),
    PHOS_SIGNED("neg", unary, Negate),
    PHOS_BOTH("min", binary, Minimum),
    PHOS_BOTH("max", binary, Maximum),
    {"min.relu.s32", binary<Relu<Minimum>, int32_t>},
    {"max.relu.s32", binary<Relu<Maximum>, int32_t>},
    PHOS_HALVES("min", Minimum),
    PHOS_HALVES("max", Maximum),
    {"min.relu.s16x2", binary<Halves<Relu<Minimum>, int16_t>, uint32_t>},
    {"max.relu.s16x2", binary<Halves<Relu<Maximum>, int16_t>, uint32_t>},
    PHOS_DOT("dp4a", PHOS_DOT4),
    PHOS_DOT("dp2a.lo", PHOS_DOT2_LOW),
    PHOS_DOT("dp2a.hi", PHOS_DOT2_HIGH),
    PHOS_CARRY("add.cc", false, false, true),
    PHOS_CARRY("addc", false, true, false),
    PHOS_CARRY("addc.cc", false, true, true),
    PHOS_CARRY("sub.cc", true, false, true),
    PHOS_CARRY("subc", true, true, false),
    PHOS_CARRY("subc.cc", true, true, true),
    PHOS_MAD_CARRY("lo", uint32_t, false, "u32"),
    PHOS_MAD_CARRY("lo", int32_t, false, "s32"),
    PHOS_MAD_CARRY("hi", uint32_t, true, "u32"),
    PHOS_MAD_CARRY("hi", int32_t, true, "s32"),
    PHOS_MAD_CARRY("lo", uint64_t, false, "u64"),
    PHOS_MAD_CARRY("lo", int64_t, false, "s64"),
    PHOS_MAD_CARRY("hi", uint64_t, true, "u64"),
    PHOS_MAD_CARRY("hi", int64_t, true, "s64"),
};

}  // namespace

HandlerTable integer_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
