// What the lanes of a warp do together. The scheduler has brought the named lanes together before.
#include "execute.h"

namespace phos::ptx::PHOS_ISA {
namespace {

// Calls `each_group(lanes, members)` for the lanes of `mask` that name the same members.
template <class Each>
[[gnu::always_inline]] inline void by_members(const Warp& warp, uint32_t slot, uint32_t mask,
                                              Each each_group) {
    const uint32_t* members = warp.slot<uint32_t>(slot);
    while (mask) {
        const uint32_t named = members[__builtin_ctz(mask)];
        uint32_t group = 0;
        for (unsigned i = 0; i < kLanes; ++i)
            group |= static_cast<uint32_t>(members[i] == named) << i;
        group &= mask;
        each_group(group & named ? group & named : group);
        mask &= ~group;
    }
}

enum class Shuffle { up, down, bfly, idx };

// op.value: the predicate's slot, which tells whether the source lane was in range.
template <Shuffle Mode>
void shuffle(const Op& op, Warp& warp, uint32_t mask) {
    const uint32_t* a = warp.slot<uint32_t>(op.a);
    const uint32_t* b = warp.slot<uint32_t>(op.b);
    const uint32_t* c = warp.slot<uint32_t>(op.c);
    uint32_t source[kLanes], results[kLanes];
    uint32_t in_range = 0;
    for (unsigned i = 0; i < kLanes; ++i) {
        const auto lane = static_cast<int32_t>(i), by = static_cast<int32_t>(b[i] & 31);
        const auto segment = static_cast<int32_t>(c[i] >> 8 & 31);
        const int32_t least = lane & segment;
        const int32_t most = least | (static_cast<int32_t>(c[i] & 31) & ~segment);
        const int32_t j = Mode == Shuffle::up     ? lane - by
                          : Mode == Shuffle::down ? lane + by
                          : Mode == Shuffle::bfly ? lane ^ by
                                                  : least | (by & ~segment);
        const bool good = Mode == Shuffle::up ? j >= most : j <= most;
        in_range |= static_cast<uint32_t>(good) << i;
        source[i] = static_cast<uint32_t>(good ? j : lane) & 31;
    }
    for (unsigned i = 0; i < kLanes; ++i) results[i] = a[source[i]];
    each<uint32_t>(op, warp, mask, [&](unsigned i) { return results[i]; });
    set_predicate(warp, static_cast<uint32_t>(op.value), mask, in_range);
}

enum class Vote { all, any, uni, ballot };

// op.a: the source predicate, op.b: the members' slot, op.value: whether the source is negated.
template <Vote Mode>
void vote(const Op& op, Warp& warp, uint32_t mask) {
    const uint32_t source = *warp.slot<uint32_t>(op.a) ^ static_cast<uint32_t>(op.value);
    by_members(warp, op.b, mask, [&](uint32_t group) {
        const uint32_t votes = source & group;
        if constexpr (Mode == Vote::ballot) {
            each<uint32_t>(op, warp, group, [&](unsigned) { return votes; });
        } else {
            const bool yes = Mode == Vote::all   ? votes == group
                             : Mode == Vote::any ? votes != 0
                                                 : votes == group || votes == 0;
            set_predicate(warp, op.d, group, yes ? kAllLanes : 0);
        }
    });
}

template <class T>
void match_any(const Op& op, Warp& warp, uint32_t mask) {
    const T* a = warp.slot<T>(op.a);
    by_members(warp, op.b, mask, [&](uint32_t group) {
        uint32_t results[kLanes];
        for (unsigned i = 0; i < kLanes; ++i) {
            uint32_t same = 0;
            for (unsigned j = 0; j < kLanes; ++j) same |= static_cast<uint32_t>(a[j] == a[i]) << j;
            results[i] = same & group;
        }
        each<uint32_t>(op, warp, group, [&](unsigned i) { return results[i]; });
    });
}

// op.value: the slot of the predicate that tells whether all are equal.
template <class T>
void match_all(const Op& op, Warp& warp, uint32_t mask) {
    const T* a = warp.slot<T>(op.a);
    by_members(warp, op.b, mask, [&](uint32_t group) {
        const T first = a[__builtin_ctz(group)];
        bool same = true;
        for (unsigned i = 0; i < kLanes; ++i) same &= !(group >> i & 1) || a[i] == first;
        each<uint32_t>(op, warp, group, [&](unsigned) { return same ? group : 0; });
        set_predicate(warp, static_cast<uint32_t>(op.value), group, same ? kAllLanes : 0);
    });
}

struct Add {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
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

template <class F, class T>
void reduce(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<T>(warp, op.a);
    by_members(warp, op.b, mask, [&](uint32_t group) {
        T total = a[static_cast<unsigned>(__builtin_ctz(group))];
        for (uint32_t rest = group & (group - 1); rest; rest &= rest - 1)
            total = F::apply(total, a[static_cast<unsigned>(__builtin_ctz(rest))]);
        each<T>(op, warp, group, [&](unsigned) { return total; });
    });
}

void active_mask(const Op& op, Warp& warp, uint32_t mask) {
    each<uint32_t>(op, warp, mask, [&](unsigned) { return mask; });
}

// The lowest member is elected: its lane in d, the predicate at op.value set in it alone.
void elect(const Op& op, Warp& warp, uint32_t mask) {
    by_members(warp, op.b, mask, [&](uint32_t group) {
        const auto leader = static_cast<uint32_t>(__builtin_ctz(group));
        each<uint32_t>(op, warp, group, [&](unsigned) { return leader; });
        set_predicate(warp, static_cast<uint32_t>(op.value), group, 1u << leader);
    });
}

const HandlerEntry kHandlers[] = {
    {"shfl.up.b32", shuffle<Shuffle::up>},
    {"shfl.down.b32", shuffle<Shuffle::down>},
    {"shfl.bfly.b32", shuffle<Shuffle::bfly>},
    {"shfl.idx.b32", shuffle<Shuffle::idx>},
    {"vote.all.pred", vote<Vote::all>},
    {"vote.any.pred", vote<Vote::any>},
    {"vote.uni.pred", vote<Vote::uni>},
    {"vote.ballot.b32", vote<Vote::ballot>},
    {"match.any.b32", match_any<uint32_t>},
    {"match.any.b64", match_any<uint64_t>},
    {"match.all.b32", match_all<uint32_t>},
    {"match.all.b64", match_all<uint64_t>},
    {"redux.add.b32", reduce<Add, uint32_t>},
    {"redux.min.b32", reduce<Minimum, uint32_t>},
    {"redux.max.b32", reduce<Maximum, uint32_t>},
    {"redux.min.s32", reduce<Minimum, int32_t>},
    {"redux.max.s32", reduce<Maximum, int32_t>},
    {"redux.and.b32", reduce<And, uint32_t>},
    {"redux.or.b32", reduce<Or, uint32_t>},
    {"redux.xor.b32", reduce<Xor, uint32_t>},
    {"activemask.b32", active_mask},
    {"elect", elect},
};

}  // namespace

HandlerTable warp_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
