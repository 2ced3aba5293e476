#include "ranges/search.h"

#include <algorithm>

namespace phos::ranges {
namespace {

// Where the address comes from, for an access of which that is all that is known.
void add_origins(const summaries::View& view, const table::Access& access, Accesses* found) {
    if (access.flags & table::kUnknownOrigin) found->unknown |= access.use;
    if (access.flags & table::kFromAnyWord) found->anywhere |= access.use;
    const uint32_t use = access.use | (access.origins.count == 1 ? Accesses::kAlone : 0);
    for (uint32_t i = 0; i < access.origins.count; ++i)
        add_origin(view.refs[access.origins.at + i], use, found);
}

// Returns how many bytes are between two ranges of the same kind; the greatest number for
// others.
uint64_t gap_of(const Range& one, const Range& other) {
    if (one.base != other.base || one.use != other.use) return ~0ull;
    const bool is_behind = static_cast<int64_t>(other.begin - one.begin) < 0;
    const uint64_t distance = is_behind ? one.begin - other.begin : other.begin - one.begin;
    const uint64_t length = is_behind ? other.length : one.length;
    return distance > length ? distance - length : 0;
}

// Has a range contain another, and what is between them.
void join(Range* range, const Range& other) {
    if (static_cast<int64_t>(other.begin - range->begin) < 0) {
        range->length = std::max(other.length, range->begin - other.begin + range->length);
        range->begin = other.begin;
    } else {
        range->length = std::max(range->length, other.begin - range->begin + other.length);
    }
}

// Adds where an access is; false if that is too much.
bool note(const table::Access& access, uint32_t base, const Bounds& ends, Accesses* found) {
    const Number length = ends.high - ends.low + access.size;
    if (length < 0 || length >> 64) return false;
    const Range range{static_cast<uint64_t>(ends.low), static_cast<uint64_t>(length), base,
                      access.use};
    if (base == kNoBase && range.begin + range.length < range.begin) return false;
    Range* closest = nullptr;
    uint64_t between = ~0ull;
    for (Range* one = found->ranges; one != found->ranges + found->range_count; ++one) {
        const uint64_t gap = gap_of(*one, range);
        if (gap >= between) continue;
        closest = one;
        between = gap;
    }
    if (between && found->range_count < Accesses::kMostRanges) {
        found->ranges[found->range_count++] = range;
        return true;
    }
    if (!closest) return false;
    if (between) found->widened |= access.use;
    join(closest, range);
    return true;
}

}  // namespace

void add_origin(uint32_t input, uint32_t use, Accesses* found) {
    uint32_t at = 0;
    while (at < found->origin_count && found->origins[at].input != input) ++at;
    if (at == Accesses::kMostOrigins) {
        found->unknown |= use & table::kUses;
        return;
    }
    if (at == found->origin_count) found->origins[found->origin_count++] = {input, 0};
    found->origins[at].use |= use;
}

const table::Access* Search::run(const table::Access* first, Accesses* found) {
    const table::Access* const all = view_.accesses + view_.body->accesses;
    const table::Access* last = first + 1;
    while (last != all && is_alike(*first, *last)) ++last;
    const auto count = static_cast<size_t>(last - first);
    bool lost[table::kMaxAccesses];
    for (size_t i = 0; i < count; ++i) lost[i] = first[i].address == table::kNone;
    const bool is_split = split(*first);
    for (uint32_t one = 0; is_split && one < cases_ && budget_->left; ++one) {
        evaluation_.next();
        if (!assume(*first, one)) continue;
        for (size_t i = 0; i < count; ++i) lost[i] = lost[i] || !evaluate(first[i], found);
    }
    for (size_t i = 0; i < count; ++i)
        if (lost[i] || !is_split || !budget_->left) add_origins(view_, first[i], found);
    return last;
}

bool Search::split(const table::Access& access) {
    evaluation_.begin(view_, launch_, budget_, deciding_);
    const uint32_t* const decided = view_.refs + access.decided.at;
    for (uint32_t i = 0; i < access.decided.count; i += 2)
        evaluation_.decide(decided[i], decided[i + 1]);
    cases_ = 1;
    if (access.choices.count > kMostChoices) return false;
    keys_ = access.choices.count;
    for (uint32_t i = 0; i < keys_; ++i) {
        places_[i] = evaluation_.places(view_.refs[access.choices.at + i]);
        if (!places_[i]) return false;
        cases_ *= static_cast<uint32_t>(__builtin_popcountll(places_[i]));
        if (cases_ > kMostCases) {
            cases_ = 1;
            keys_ = 0;
            break;
        }
    }
    of_choices_ = cases_;
    loops_ = 0;
    while (loops_ < access.loops.count && cases_ * 2 <= kMostCases) {
        cases_ *= 2;
        ++loops_;
    }
    return true;
}

bool Search::assume(const table::Access& access, uint32_t one) {
    uint32_t rest = one % of_choices_;
    const uint32_t iterations = one / of_choices_;
    uint32_t chosen[kMostChoices];
    for (uint32_t i = 0; i < keys_; ++i) {
        const auto count = static_cast<uint32_t>(__builtin_popcountll(places_[i]));
        uint64_t left = places_[i];
        for (uint32_t skip = rest % count; skip; --skip) left &= left - 1;
        rest /= count;
        chosen[i] = static_cast<uint32_t>(__builtin_ctzll(left));
        evaluation_.choose(view_.refs[access.choices.at + i], chosen[i]);
    }
    for (uint32_t i = 0; i < loops_; ++i)
        evaluation_.enter(view_.refs[access.loops.at + i], iterations >> i & 1);
    for (uint32_t i = 0; i < access.facts.count; ++i)
        evaluation_.constrain(view_.conditions[view_.refs[access.facts.at + i]], true);
    for (uint32_t i = 0; i < keys_; ++i) {
        const table::Key& key = view_.keys[view_.refs[access.choices.at + i]];
        if (key.kind == table::kIf) evaluation_.constrain(view_.conditions[key.at], chosen[i] == 0);
    }
    return evaluation_.state() == Evaluation::State::fine;
}

bool Search::evaluate(const table::Access& access, Accesses* found) {
    uint32_t base = kNoBase;
    Bounds ends;
    switch (evaluation_.bounds(access.address, &base, &ends)) {
        case Evaluation::State::fine:
            return ends.known() && note(access, base, ends, found);
        case Evaluation::State::impossible:
            return true;
        default:
            return false;
    }
}

}  // namespace phos::ranges
