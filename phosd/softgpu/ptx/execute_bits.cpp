// Logic, shifts, bit fields, permutation.
#include "execute.h"

namespace phos::ptx::PHOS_ISA {
namespace {

struct And {
    template <class T>
    static T apply(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <class T>
    static T apply(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <class T>
    static T apply(T a, T b) {
        return a ^ b;
    }
};
struct Not {
    template <class T>
    static T apply(T a) {
        return static_cast<T>(~a);
    }
};
struct LogicalNot {
    template <class T>
    static T apply(T a) {
        return a == 0;
    }
};

// Shift amounts are 32 bits unsigned, and clamp: a shift by the width or more leaves the fill.
struct ShiftLeft {
    template <class T>
    static T apply(T a, uint32_t by) {
        return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<uint64_t>(a) << by);
    }
};
struct ShiftRight {
    template <class T>
    static T apply(T a, uint32_t by) {
        constexpr uint32_t top = 8 * sizeof(T) - 1;
        if constexpr (std::is_signed_v<T>)
            return static_cast<T>(a >> (by > top ? top : by));
        else
            return by > top ? T{0} : static_cast<T>(a >> by);
    }
};
template <bool Left, bool Wraps>
struct Funnel {
    static uint32_t apply(uint32_t low, uint32_t top, uint32_t by) {
        const uint32_t n = Wraps ? by & 31 : by > 32 ? 32 : by;
        const uint64_t both = low | uint64_t{top} << 32;
        return static_cast<uint32_t>(Left ? (both << n) >> 32 : both >> n);
    }
};

struct BitFieldExtract {
    template <class T>
    static T apply(T a, uint32_t position, uint32_t length) {
        constexpr uint32_t top = 8 * sizeof(T) - 1;
        using U = std::make_unsigned_t<T>;
        const uint32_t p = position & 0xff, n = length & 0xff;
        if (n == 0) return 0;
        const uint32_t room = p > top ? 0 : top + 1 - p, valid = n < room ? n : room;
        const U ones = valid > top ? ~U{0} : static_cast<U>((U{1} << valid) - 1);
        const U field = p > top ? U{0} : static_cast<U>(static_cast<U>(a) >> p & ones);
        if constexpr (std::is_signed_v<T>) {
            const uint32_t sign_at = p + n - 1 > top ? top : p + n - 1;
            const bool sign = static_cast<U>(a) >> sign_at & 1;
            return static_cast<T>(sign ? field | static_cast<U>(~ones) : field);
        } else {
            return field;
        }
    }
};
template <class T>
[[gnu::always_inline]] inline T insert(T a, T b, uint32_t position, uint32_t length) {
    constexpr uint32_t width = 8 * sizeof(T);
    const uint32_t p = position & 0xff, n = length & 0xff;
    if (p >= width || n == 0) return b;
    const T ones = n >= width ? ~T{0} : static_cast<T>((T{1} << n) - 1);
    const T field = static_cast<T>(ones << p);
    return static_cast<T>((b & ~field) | ((a << p) & field));
}
// bfi has four operands: the length's slot is op.value.
template <class T>
void bit_field_insert(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    const auto b = read<T>(warp, op.b);
    const auto position = read<uint32_t>(warp, op.c);
    const auto length = read<uint32_t>(warp, static_cast<uint32_t>(op.value));
    each<T>(op, warp, mask, [&](unsigned i) { return insert(a[i], b[i], position[i], length[i]); });
}

struct PopulationCount {
    static uint32_t apply(uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(a)); }
    static uint32_t apply(uint64_t a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
};
struct LeadingZeros {
    static uint32_t apply(uint32_t a) { return a ? static_cast<uint32_t>(__builtin_clz(a)) : 32; }
    static uint32_t apply(uint64_t a) { return a ? static_cast<uint32_t>(__builtin_clzll(a)) : 64; }
};
// The position of the most significant bit that is not the sign, all ones when there is none;
// Amount: the shift that brings it to the top instead.
template <bool Amount>
struct FindBit {
    template <class T>
    static uint32_t apply(T a) {
        using U = std::make_unsigned_t<T>;
        const U magnitude = static_cast<U>(std::is_signed_v<T> && a < 0 ? ~a : a);
        if (magnitude == 0) return ~0u;
        const uint32_t zeros = LeadingZeros::apply(magnitude);
        return Amount ? zeros : 8 * sizeof(T) - 1 - zeros;
    }
};
struct Reverse {
    template <class T>
    static T apply(T a) {
        uint64_t v = a;
        v = (v >> 1 & 0x5555555555555555) | (v & 0x5555555555555555) << 1;
        v = (v >> 2 & 0x3333333333333333) | (v & 0x3333333333333333) << 2;
        v = (v >> 4 & 0x0f0f0f0f0f0f0f0f) | (v & 0x0f0f0f0f0f0f0f0f) << 4;
        return static_cast<T>(__builtin_bswap64(v) >> (64 - 8 * sizeof(T)));
    }
};
template <bool Wraps>
struct BitMask {
    static uint32_t apply(uint32_t a, uint32_t b) {
        if (Wraps) a &= 31, b &= 31;
        if (a >= 32 || b == 0) return 0;
        const uint32_t ones = b >= 32 ? ~0u : (1u << b) - 1;
        return ones << a;
    }
};
template <bool Wraps>
struct SignExtend {
    static int32_t apply(int32_t a, uint32_t n) {
        if (Wraps) n &= 31;
        if (n == 0) return 0;
        if (n >= 32) return a;
        return static_cast<int32_t>(static_cast<uint32_t>(a) << (32 - n)) >> (32 - n);
    }
    static uint32_t apply(uint32_t a, uint32_t n) {
        if (Wraps) n &= 31;
        return n >= 32 ? a : a & ((1u << n) - 1);
    }
};
// The position of the n-th set bit of a, counted from `base` upwards (n > 0) or downwards.
struct FindNth {
    static uint32_t apply(uint32_t a, uint32_t base, int32_t n) {
        if (base > 31) return ~0u;
        if (n == 0) return a >> base & 1 ? base : ~0u;
        int32_t left = n > 0 ? n : -n;
        for (int32_t at = static_cast<int32_t>(base); at >= 0 && at < 32; at += n > 0 ? 1 : -1)
            if (a >> at & 1 && --left == 0) return static_cast<uint32_t>(at);
        return ~0u;
    }
};

// lop3: the truth table is op.value; each of its eight bits selects a minterm.
void logic3(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<uint32_t>(warp, op.a);
    const auto b = read<uint32_t>(warp, op.b);
    const auto c = read<uint32_t>(warp, op.c);
    uint32_t minterm[8];
    for (unsigned bit = 0; bit < 8; ++bit) minterm[bit] = op.value >> bit & 1 ? ~0u : 0;
    each<uint32_t>(op, warp, mask, [&](unsigned i) {
        const uint32_t x = a[i], y = b[i], z = c[i];
        return (minterm[0] & ~x & ~y & ~z) | (minterm[1] & ~x & ~y & z) |
               (minterm[2] & ~x & y & ~z) | (minterm[3] & ~x & y & z) | (minterm[4] & x & ~y & ~z) |
               (minterm[5] & x & ~y & z) | (minterm[6] & x & y & ~z) | (minterm[7] & x & y & z);
    });
}

struct Permute {
    static uint32_t apply(uint32_t a, uint32_t b, uint32_t selector) {
        const uint64_t bytes = a | uint64_t{b} << 32;
        uint32_t result = 0;
        for (unsigned i = 0; i < 4; ++i) {
            const uint32_t pick = selector >> (4 * i) & 0xf;
            uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7))) & 0xff;
            if (pick & 8) byte = (0 - (byte >> 7)) & 0xff;
            result |= byte << (8 * i);
        }
        return result;
    }
};
// The named modes of prmt as the selector each stands for, by the low two bits of c.
enum class Mode { f4e, b4e, rc8, ecl, ecr, rc16 };
constexpr uint16_t kSelectors[6][4] = {
    {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
    {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
    {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232},
};
template <Mode M>
struct PermuteMode {
    static uint32_t apply(uint32_t a, uint32_t b, uint32_t c) {
        return Permute::apply(a, b, kSelectors[static_cast<int>(M)][c & 3]);
    }
};

// Predicate logic works on whole masks. op.value: bit 0 negates a, bit 1 negates b.
template <class F>
void predicate_logic(const Op& op, Warp& warp, uint32_t mask) {
    const uint32_t a = *warp.slot<uint32_t>(op.a) ^ (op.value & 1 ? kAllLanes : 0);
    const uint32_t b = *warp.slot<uint32_t>(op.b) ^ (op.value & 2 ? kAllLanes : 0);
    set_predicate(warp, op.d, mask, F::apply(a, b));
}

#define PHOS_WIDTHS(name, F)                                                  \
    {name ".b16", binary<F, uint16_t>}, {name ".b32", binary<F, uint32_t>}, { \
        name ".b64", binary<F, uint64_t>                                      \
    }
#define PHOS_SHIFT(name, T) {name, binary<ShiftRight, T, T, uint32_t>}
#define PHOS_FIND(T, suffix)                                        \
    {"bfind." suffix, unary<FindBit<false>, uint32_t, T>}, {        \
        "bfind.shiftamt." suffix, unary<FindBit<true>, uint32_t, T> \
    }
#define PHOS_MODE(name) {"prmt." #name ".b32", ternary<PermuteMode<Mode::name>, uint32_t>}

const HandlerEntry kHandlers[] = {
    PHOS_WIDTHS("and", And),
    PHOS_WIDTHS("or", Or),
    PHOS_WIDTHS("xor", Xor),
    {"not.b16", unary<Not, uint16_t>},
    {"not.b32", unary<Not, uint32_t>},
    {"not.b64", unary<Not, uint64_t>},
    {"cnot.b16", unary<LogicalNot, uint16_t>},
    {"cnot.b32", unary<LogicalNot, uint32_t>},
    {"cnot.b64", unary<LogicalNot, uint64_t>},
    {"and.pred", predicate_logic<And>},
    {"or.pred", predicate_logic<Or>},
    {"xor.pred", predicate_logic<Xor>},
    {"shl.b16", binary<ShiftLeft, uint16_t, uint16_t, uint32_t>},
    {"shl.b32", binary<ShiftLeft, uint32_t, uint32_t, uint32_t>},
    {"shl.b64", binary<ShiftLeft, uint64_t, uint64_t, uint32_t>},
    PHOS_SHIFT("shr.b16", uint16_t),
    PHOS_SHIFT("shr.b32", uint32_t),
    PHOS_SHIFT("shr.b64", uint64_t),
    PHOS_SHIFT("shr.s16", int16_t),
    PHOS_SHIFT("shr.s32", int32_t),
    PHOS_SHIFT("shr.s64", int64_t),
    {"shf.l.wrap.b32", ternary<Funnel<true, true>, uint32_t>},
    {"shf.l.clamp.b32", ternary<Funnel<true, false>, uint32_t>},
    {"shf.r.wrap.b32", ternary<Funnel<false, true>, uint32_t>},
    {"shf.r.clamp.b32", ternary<Funnel<false, false>, uint32_t>},
    {"bfe.u32", ternary<BitFieldExtract, uint32_t, uint32_t, uint32_t, uint32_t>},
    {"bfe.s32", ternary<BitFieldExtract, int32_t, int32_t, uint32_t, uint32_t>},
    {"bfe.u64", ternary<BitFieldExtract, uint64_t, uint64_t, uint32_t, uint32_t>},
    {"bfe.s64", ternary<BitFieldExtract, int64_t, int64_t, uint32_t, uint32_t>},
    {"bfi.b32", bit_field_insert<uint32_t>},
    {"bfi.b64", bit_field_insert<uint64_t>},
    {"popc.b32", unary<PopulationCount, uint32_t, uint32_t>},
    {"popc.b64", unary<PopulationCount, uint32_t, uint64_t>},
    {"clz.b32", unary<LeadingZeros, uint32_t, uint32_t>},
    {"clz.b64", unary<LeadingZeros, uint32_t, uint64_t>},
    PHOS_FIND(uint32_t, "u32"),
    PHOS_FIND(int32_t, "s32"),
    PHOS_FIND(uint64_t, "u64"),
    PHOS_FIND(int64_t, "s64"),
    {"brev.b32", unary<Reverse, uint32_t>},
    {"brev.b64", unary<Reverse, uint64_t>},
    {"bmsk.wrap.b32", binary<BitMask<true>, uint32_t>},
    {"bmsk.clamp.b32", binary<BitMask<false>, uint32_t>},
    {"szext.wrap.u32", binary<SignExtend<true>, uint32_t>},
    {"szext.clamp.u32", binary<SignExtend<false>, uint32_t>},
    {"szext.wrap.s32", binary<SignExtend<true>, int32_t, int32_t, uint32_t>},
    {"szext.clamp.s32", binary<SignExtend<false>, int32_t, int32_t, uint32_t>},
    {"fns.b32", ternary<FindNth, uint32_t, uint32_t, uint32_t, int32_t>},
    {"lop3.b32", logic3},
    {"prmt.b32", ternary<Permute, uint32_t>},
    PHOS_MODE(f4e),
    PHOS_MODE(b4e),
    PHOS_MODE(rc8),
    PHOS_MODE(ecl),
    PHOS_MODE(ecr),
    PHOS_MODE(rc16),
};

}  // namespace

HandlerTable bits_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
