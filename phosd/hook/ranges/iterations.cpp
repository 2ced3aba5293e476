// What loops carry, and how often they have gone on.
#include <algorithm>
#include <utility>

#include "ranges/comparisons.h"
#include "ranges/evaluation.h"

namespace phos::ranges {

using table::How;
using table::kNone;

bool Evaluation::carried(const table::Node& node, Sum* made) {
    const Sum* const initial = this->node(node.one);
    if (!initial) return false;
    *made = *initial;
    if (initial->base != kNoBase && node.bits != 64) return lose();
    if (has(entered_, node.at) && entered_.values[node.at]) return true;
    const Sum* each = nullptr;
    if (node.other != kNone) {
        each = this->node(node.other);
        if (!each) return false;
        if (each->base != kNoBase) return lose();
    }
    if (!each || each->count) return towards(*initial, each, made);
    Sum step;
    ranges::set(&step, each->constant);
    if (!reduce(&step, node.bits)) return lose();
    if (!step.constant) return true;
    const Sum* const count = iterations(node.at);
    if (!count) return false;
    return add(made, *count, static_cast<int64_t>(step.constant)) || lose();
}

// What changes in each iteration by another number.
bool Evaluation::towards(const Sum& initial, const Sum* each, Sum* made) {
    Bounds within;
    Bounds change;
    Bounds ends;
    const uint32_t base = initial.base;
    if (each && !bounds_of(*each, &change)) return false;
    const bool rises = change.has_low && change.low >= 0;
    const bool falls = !rises && change.has_high && change.high <= 0;
    if ((rises || falls) && !bounds_of(initial, &ends)) return false;
    if (rises) {
        within.has_low = ends.has_low;
        within.low = ends.low;
    } else if (falls) {
        within.has_high = ends.has_high;
        within.high = ends.high;
    }
    if (!unknown(within, made)) return false;
    made->base = base;
    return true;
}

// The number of iterations before this one.
const Sum* Evaluation::iterations(uint32_t loop) {
    if (has(counts_, loop)) return &sums_[counts_.values[loop]];
    const bool later = has(entered_, loop) && !entered_.values[loop];
    const Number least = later ? 1 : 0;
    Bounds most{true, false, least, 0};
    Sum* const count = fresh();
    if (!count || !unknown(most, count)) return nullptr;
    set(counts_, loop, static_cast<uint32_t>(count - sums_));
    const uint8_t name = count->unknowns[0];
    const table::Loop& one = view_.loops[loop];
    for (uint32_t i = 0; i < one.count; ++i)
        if (!limit(view_.conditions[view_.refs[one.at + i]], name, later, &most) && !forget())
            return nullptr;
    if (most.has_high && most.high < least) {
        contradict();
        return nullptr;
    }
    if (most.has_high && most.high == least)
        ranges::set(count, least);
    else
        system_.narrow(name, most);
    return count;
}

bool Evaluation::limit(const table::Condition& condition, uint8_t count, bool later, Bounds* most) {
    const Sum* one = node(condition.one);
    const Sum* other = one ? node(condition.other) : nullptr;
    if (!other) return false;
    if (one->base != kNoBase || other->base != kNoBase) return lose();
    auto how = static_cast<How>(condition.how);
    if (other->factor_of(count)) {
        std::swap(one, other);
        how = swapped(how);
    }
    const int64_t step = one->factor_of(count);
    if (!step || step == INT64_MIN || other->factor_of(count)) return true;
    Sum counted;
    ranges::set(&counted, 0);
    counted.count = 1;
    counted.factors[0] = 1;
    counted.unknowns[0] = count;
    counted.mask = uint64_t{1} << count;
    Sum start = *one;
    if (!add(&start, counted, -step)) return lose();
    const unsigned width = condition.width;
    if (how == table::kUnequal) return until_equal(start, *other, step, width, count, most);
    const Number size = size_of(width);
    const Number least = condition.is_signed ? -(size >> 1) : Number{0};
    Bounds starts;
    Bounds ends;
    bool first_fits = false;
    bool other_fits = false;
    Sum first;
    Sum compared;
    if (!as_word(start, least, width, &first_fits, &first, &starts) ||
        !as_word(*other, least, width, &other_fits, &compared, &ends))
        return false;
    if (!first_fits || !other_fits) return true;
    const Number strict = is_strict(how) ? 1 : 0;
    Number last = 0;
    Sum rest;
    // The word never wraps: as long as it goes on, one step more is still a number of this width.
    if ((how == table::kLess || how == table::kNotMore) && step > 0 &&
        ends.high - strict + step < least + size) {
        last = ends.high - strict - starts.low;
        rest = compared;
        if (!add(&rest, first, -1) || !add(&rest, counted, -step)) return lose();
    } else if ((how == table::kMore || how == table::kNotLess) && step < 0 &&
               ends.low + strict + step >= least) {
        last = starts.high - ends.low - strict;
        rest = first;
        if (!add(&rest, compared, -1) || !add(&rest, counted, step)) return lose();
    } else {
        return true;
    }
    const Number pace = step < 0 ? -Number{step} : Number{step};
    if (later) {
        if (!move(&rest, pace - strict)) return lose();
        if (!hold(rest)) return false;
    }
    const Number iterations = last >= 0 ? last / pace + 1 : Number{0};
    most->high = most->has_high ? std::min(most->high, iterations) : iterations;
    most->has_high = true;
    return true;
}

// How many steps of one size lead to `end`, if it is met exactly.
bool Evaluation::until_equal(const Sum& start, const Sum& end, int64_t step, unsigned width,
                             uint8_t count, Bounds* most) {
    Sum way = step > 0 ? end : start;
    if (!add(&way, step > 0 ? start : end, -1) || !reduce(&way, width)) return lose();
    const int64_t pace = step < 0 ? -step : step;
    Bounds ends;
    bool fits = false;
    Sum steps;
    if (!as_word(way, 0, width, &fits, &steps, &ends)) return false;
    if (!fits || steps.constant % pace) return true;
    for (uint32_t i = 0; i < steps.count; ++i)
        if (steps.factors[i] % pace) return true;
    Sum counted;
    ranges::set(&counted, 0);
    counted.count = 1;
    counted.factors[0] = 1;
    counted.unknowns[0] = count;
    counted.mask = uint64_t{1} << count;
    if (!add(&steps, counted, -pace)) return lose();
    if (!hold(steps)) return false;
    const Number iterations = ends.high / pace;
    most->high = most->has_high ? std::min(most->high, iterations) : iterations;
    most->has_high = true;
    return true;
}

}  // namespace phos::ranges
