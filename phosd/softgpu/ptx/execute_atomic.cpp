// Atomic operations. They are atomic on the host, so also between streams and processes.
#include "address.h"
#include "float_format.h"

namespace phos::ptx::PHOS_ISA {
namespace {

struct Add {
    template <class T>
    static T apply(T old, T b) {
        if constexpr (std::is_integral_v<T>)
            return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) +
                                  static_cast<std::make_unsigned_t<T>>(b));
        else
            return old + b;
    }
};
struct Minimum {
    template <class T>
    static T apply(T old, T b) {
        return b < old ? b : old;
    }
};
struct Maximum {
    template <class T>
    static T apply(T old, T b) {
        return b > old ? b : old;
    }
};
struct And {
    template <class T>
    static T apply(T old, T b) {
        return old & b;
    }
};
struct Or {
    template <class T>
    static T apply(T old, T b) {
        return old | b;
    }
};
struct Xor {
    template <class T>
    static T apply(T old, T b) {
        return old ^ b;
    }
};
struct Exchange {
    template <class T>
    static T apply(T, T b) {
        return b;
    }
};
struct Increment {
    static uint32_t apply(uint32_t old, uint32_t b) { return old >= b ? 0 : old + 1; }
};
struct Decrement {
    static uint32_t apply(uint32_t old, uint32_t b) { return old == 0 || old > b ? b : old - 1; }
};
// Halves add in f32, which holds the exact sum closely enough to round once more.
template <bool Brain>
struct AddHalf {
    static uint32_t one(uint32_t a, uint32_t b) {
        return Brain ? to_bf16(from_bf16(a & 0xffff) + from_bf16(b & 0xffff))
                     : to_f16(from_f16(a & 0xffff) + from_f16(b & 0xffff));
    }
    static uint32_t apply(uint32_t a, uint32_t b) {
        return one(a, b) | one(a >> 16, b >> 16) << 16;
    }
    static uint16_t apply(uint16_t a, uint16_t b) { return static_cast<uint16_t>(one(a, b)); }
};

template <class T>
using Word = std::conditional_t<sizeof(T) == 8, uint64_t,
                                std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;

// Applies `next` to the word at each lane's address, in the order of the lanes, and keeps the old
// values in the destination.
template <class T, class Next>
[[gnu::always_inline]] inline void update(const Op& op, Warp& warp, uint32_t mask, Next next) {
    Resolved at;
    resolve(*op.access, warp, mask, true, at);
    Lane<T>* d = warp.slot<Lane<T>>(op.d);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const auto i = static_cast<unsigned>(__builtin_ctz(rest));
        auto* word = reinterpret_cast<Word<T>*>(at.host[i]);
        Word<T> old = __atomic_load_n(word, __ATOMIC_RELAXED);
        while (true) {
            const auto fresh = bits_as<Word<T>>(next(bits_as<T>(old), i, at.host[i]));
            if (__atomic_compare_exchange_n(word, &old, fresh, true, __ATOMIC_SEQ_CST,
                                            __ATOMIC_RELAXED))
                break;
        }
        d[i] = old;
    }
}

template <class F, class T>
void combine(const Op& op, Warp& warp, uint32_t mask) {
    const auto b = read<T>(warp, op.b);
    update<T>(op, warp, mask, [&](T old, unsigned i, uint64_t) { return F::apply(old, b[i]); });
}

// In global memory f32 additions flush subnormals, in shared memory they do not.
void add_float(const Op& op, Warp& warp, uint32_t mask) {
    const auto b = read<float>(warp, op.b);
    const auto shared = reinterpret_cast<uint64_t>(warp.block->shared);
    const uint64_t bytes = warp.block->shared_bytes;
    update<float>(op, warp, mask, [&](float old, unsigned i, uint64_t host) {
        const bool keeps = host - shared < bytes;
        const float sum = keeps ? old + b[i] : flush(flush(old) + flush(b[i]));
        return canonical(sum);
    });
}

template <class T>
void compare_and_swap(const Op& op, Warp& warp, uint32_t mask) {
    const auto expected = read<T>(warp, op.b);
    const auto fresh = read<T>(warp, op.c);
    update<T>(op, warp, mask,
              [&](T old, unsigned i, uint64_t) { return old == expected[i] ? fresh[i] : old; });
}

// red.v2/.v4.f32 and atom with vectors: one addition a component.
void add_vector(const Op& op, Warp& warp, uint32_t mask) {
    Resolved at;
    resolve(*op.access, warp, mask, true, at);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const auto i = static_cast<unsigned>(__builtin_ctz(rest));
        for (unsigned c = 0; c < op.access->count; ++c) {
            auto* word = reinterpret_cast<uint32_t*>(at.host[i]) + c;
            const float b = flush(bits_as<float>(warp.slot<uint32_t>(op.access->slots[c])[i]));
            uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED), fresh;
            do fresh = bits_as<uint32_t>(canonical(flush(flush(bits_as<float>(old)) + b)));
            while (!__atomic_compare_exchange_n(word, &old, fresh, true, __ATOMIC_SEQ_CST,
                                                __ATOMIC_RELAXED));
        }
    }
}

#define PHOS_INTEGERS(name, F)                                                \
    {name ".b32", combine<F, uint32_t>}, {name ".b64", combine<F, uint64_t>}, \
        {name ".s32", combine<F, int32_t>}, {                                 \
        name ".s64", combine<F, int64_t>                                      \
    }

const HandlerEntry kHandlers[] = {
    PHOS_INTEGERS("atom.add", Add),
    PHOS_INTEGERS("atom.min", Minimum),
    PHOS_INTEGERS("atom.max", Maximum),
    PHOS_INTEGERS("atom.and", And),
    PHOS_INTEGERS("atom.or", Or),
    PHOS_INTEGERS("atom.xor", Xor),
    PHOS_INTEGERS("atom.exch", Exchange),
    {"atom.inc.b32", combine<Increment, uint32_t>},
    {"atom.dec.b32", combine<Decrement, uint32_t>},
    {"atom.cas.b16", compare_and_swap<uint16_t>},
    {"atom.cas.b32", compare_and_swap<uint32_t>},
    {"atom.cas.b64", compare_and_swap<uint64_t>},
    {"atom.add.f32", add_float},
    {"atom.add.f64", combine<Add, double>},
    {"atom.add.f16", combine<AddHalf<false>, uint16_t>},
    {"atom.add.bf16", combine<AddHalf<true>, uint16_t>},
    {"atom.add.f16x2", combine<AddHalf<false>, uint32_t>},
    {"atom.add.bf16x2", combine<AddHalf<true>, uint32_t>},
    {"red.add.vector.f32", add_vector},
};

}  // namespace

HandlerTable atomic_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
