#include "ranges/sums.h"

#include <algorithm>

namespace phos::ranges {
namespace {

constexpr Number kMostNumber = ~(Number{1} << 127);

bool fits(Number value, int64_t* factor) {
    *factor = static_cast<int64_t>(value);
    return *factor == value;
}

// Sets `found`, which is neither, to `sum` times `scale` plus `other` times `factor`, without
// bases.
bool combine(const Sum& sum, int64_t scale, const Sum& other, int64_t factor, Sum* found) {
    Number left = 0;
    Number right = 0;
    if (__builtin_mul_overflow(sum.constant, scale, &left) ||
        __builtin_mul_overflow(other.constant, factor, &right) ||
        __builtin_add_overflow(left, right, &found->constant))
        return false;
    found->count = 0;
    found->mask = 0;
    found->base = kNoBase;
    uint32_t i = 0;
    uint32_t j = 0;
    while (i < sum.count || j < other.count) {
        const bool ours =
            j == other.count || (i < sum.count && sum.unknowns[i] <= other.unknowns[j]);
        const bool theirs =
            i == sum.count || (j < other.count && other.unknowns[j] <= sum.unknowns[i]);
        const uint8_t unknown = ours ? sum.unknowns[i] : other.unknowns[j];
        Number value = 0;
        if (ours) value += Number{sum.factors[i++]} * scale;
        if (theirs) value += Number{other.factors[j++]} * factor;
        if (!value) continue;
        if (found->count == kMostTerms || !fits(value, &found->factors[found->count])) return false;
        found->unknowns[found->count++] = unknown;
        found->mask |= uint64_t{1} << unknown;
    }
    return true;
}

int64_t smallest(uint64_t value, unsigned bits) {
    return static_cast<int64_t>(value << (64 - bits)) >> (64 - bits);
}

}  // namespace

int64_t Sum::factor_of(uint8_t unknown) const {
    if (!(mask >> unknown & 1)) return 0;
    for (uint32_t i = 0; i < count; ++i)
        if (unknowns[i] == unknown) return factors[i];
    return 0;
}

bool add(Sum* sum, const Sum& other, int64_t factor) {
    uint32_t base = sum->base;
    if (other.base != kNoBase) {
        if (factor != 1 || base != kNoBase) return false;
        base = other.base;
    }
    Sum found;
    if (!combine(*sum, 1, other, factor, &found)) return false;
    *sum = found;
    sum->base = base;
    return true;
}

bool multiply(Sum* sum, Number factor) {
    if (factor == 1) return true;
    if (sum->base != kNoBase) return false;
    if (!factor) {
        set(sum, 0);
        return true;
    }
    if (__builtin_mul_overflow(sum->constant, factor, &sum->constant)) return false;
    for (uint32_t i = 0; i < sum->count; ++i) {
        Number product = 0;
        if (__builtin_mul_overflow(Number{sum->factors[i]}, factor, &product) ||
            !fits(product, &sum->factors[i]))
            return false;
    }
    return true;
}

bool move(Sum* sum, Number by) {
    return !__builtin_add_overflow(sum->constant, by, &sum->constant);
}

bool reduce(Sum* sum, unsigned bits) {
    if (sum->base != kNoBase && bits != 64) return false;
    sum->constant = smallest(static_cast<uint64_t>(sum->constant), bits);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < sum->count; ++i) {
        const int64_t factor = smallest(static_cast<uint64_t>(sum->factors[i]), bits);
        if (!factor) {
            sum->mask &= ~(uint64_t{1} << sum->unknowns[i]);
            continue;
        }
        sum->factors[kept] = factor;
        sum->unknowns[kept++] = sum->unknowns[i];
    }
    sum->count = kept;
    return true;
}

bool divide(Sum* sum, int64_t divisor) {
    if (sum->base != kNoBase) return false;
    for (uint32_t i = 0; i < sum->count; ++i)
        if (sum->factors[i] % divisor) return false;
    for (uint32_t i = 0; i < sum->count; ++i) sum->factors[i] /= divisor;
    sum->constant = floor_of(sum->constant, divisor);
    return true;
}

void System::reset(Budget* budget) {
    budget_ = budget;
    unknowns_ = 0;
    held_ = 0;
    answered_ = 0;
}

bool System::make(const Bounds& within, uint8_t* unknown) {
    if (unknowns_ == kMostUnknowns) return false;
    *unknown = static_cast<uint8_t>(unknowns_++);
    known_[*unknown] = within;
    return true;
}

bool System::hold(const Sum& sum) {
    if (!sum.count) return sum.constant >= 0;
    constraints_[held_++ % kMostConstraints] = sum;
    return true;
}

bool System::bounds(const Sum& sum, Bounds* found) {
    const Bounds* known = nullptr;
    const auto count = static_cast<uint32_t>(std::min<size_t>(answered_, kAnswers));
    for (const Answer* one = answers_; one != answers_ + count && !known; ++one)
        if (one->held == held_ && one->sum.mask == sum.mask &&
            std::equal(sum.factors, sum.factors + sum.count, one->sum.factors))
            known = &one->bounds;
    if (!known) {
        Answer& answer = answers_[answered_++ % kAnswers];
        answer.held = held_;
        answer.sum = sum;
        answer.sum.constant = 0;
        search(answer.sum, &answer.bounds);
        known = &answer.bounds;
    }
    *found = *known;
    found->has_low &= !__builtin_add_overflow(known->low, sum.constant, &found->low);
    found->has_high &= !__builtin_add_overflow(known->high, sum.constant, &found->high);
    return !found->known() || found->low <= found->high;
}

void System::search(const Sum& sum, Bounds* found) {
    Sum nothing;
    Sum opposite;
    set(&nothing, 0);
    Number high = 0;
    found->has_low = least(sum, 0, kDeepest, &found->low);
    found->has_high = combine(nothing, 1, sum, -1, &opposite) &&
                      least(opposite, 0, kDeepest, &high) && high >= -kMostNumber;
    found->high = -high;
}

// Sets a number that the sum is not below; false if none is known.
bool System::least(const Sum& sum, uint32_t used, int depth, Number* found) {
    bool any = true;
    Number best = sum.constant;
    for (uint32_t i = 0; i < sum.count && any; ++i) {
        const Bounds& known = known_[sum.unknowns[i]];
        const bool rises = sum.factors[i] > 0;
        Number part = 0;
        any = (rises ? known.has_low : known.has_high) &&
              !__builtin_mul_overflow(rises ? known.low : known.high, Number{sum.factors[i]},
                                      &part) &&
              !__builtin_add_overflow(best, part, &best);
    }
    *found = best;
    if (!depth) return any;
    const uint32_t first = held_ > kMostConstraints ? held_ - kMostConstraints : 0;
    for (uint32_t place = first; place < held_; ++place) {
        const uint32_t slot = place % kMostConstraints;
        const Sum& constraint = constraints_[slot];
        if (used >> slot & 1 || !(constraint.mask & sum.mask)) continue;
        for (uint32_t i = 0; i < constraint.count; ++i) {
            const int64_t ours = sum.factor_of(constraint.unknowns[i]);
            const int64_t theirs = constraint.factors[i];
            // What is taken away must be positive, and cancel this unknown.
            if (!ours || (ours > 0) != (theirs > 0)) continue;
            if (ours == INT64_MIN || theirs == INT64_MIN) continue;
            if (!budget_->spend(1)) return any;
            const int64_t scale = theirs < 0 ? -theirs : theirs;
            Sum rest;
            if (!combine(sum, scale, constraint, ours < 0 ? ours : -ours, &rest) ||
                rest.count > sum.count + 1)
                continue;
            Number low = 0;
            if (!least(rest, used | 1u << slot, depth - 1, &low)) continue;
            if (scale != 1) low = -floor_of(-low, scale);
            *found = any ? std::max(*found, low) : low;
            any = true;
        }
    }
    return any;
}

}  // namespace phos::ranges
