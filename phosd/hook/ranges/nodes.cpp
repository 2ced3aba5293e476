// What each kind of node is for a launch.
#include <algorithm>

#include "ranges/evaluation.h"

namespace phos::ranges {

bool Evaluation::sum(const table::Node& node, Sum* made) {
    using Unsigned = unsigned __int128;
    ranges::set(made, static_cast<Number>(static_cast<Unsigned>(node.high) << 64 |
                                          static_cast<uint64_t>(node.low)));
    const table::Factor* const first = view_.factors + node.at;
    for (const table::Factor* part = first; part != first + node.count; ++part) {
        const Sum* const inner = this->node(part->node);
        if (!inner || !add(made, *inner, part->factor)) return lose();
    }
    return true;
}

bool Evaluation::product(const table::Node& node, Sum* made) {
    ranges::set(made, 1);
    for (uint32_t i = 0; i < node.count; ++i) {
        const Sum* const other = this->node(view_.refs[node.at + i]);
        if (!other) return false;
        if (made->is_number()) {
            const Number factor = made->constant;
            *made = *other;
            if (!multiply(made, factor)) return lose();
        } else if (other->is_number()) {
            if (!multiply(made, other->constant)) return lose();
        } else {
            if (made->base != kNoBase || other->base != kNoBase) return lose();
            Bounds one;
            Bounds two;
            if (!bounds_of(*made, &one) || !bounds_of(*other, &two)) return false;
            Bounds within;
            if (one.known() && two.known()) {
                Number ends[4];
                if (__builtin_mul_overflow(one.low, two.low, &ends[0]) ||
                    __builtin_mul_overflow(one.low, two.high, &ends[1]) ||
                    __builtin_mul_overflow(one.high, two.low, &ends[2]) ||
                    __builtin_mul_overflow(one.high, two.high, &ends[3]))
                    return lose();
                within =
                    between(*std::min_element(ends, ends + 4), *std::max_element(ends, ends + 4));
            }
            if (!unknown(within, made)) return false;
        }
    }
    return true;
}

// The number that is equal to the node modulo 2^bits, and is from `low` on.
bool Evaluation::word(const table::Node& node, Sum* made) {
    const Sum* const inner = this->node(node.one);
    if (!inner) return false;
    *made = *inner;
    if (made->base != kNoBase) return node.bits == 64 || lose();  // of addresses, all that matters
    if (!reduce(made, node.bits)) return lose();
    Bounds ends;
    if (!bounds_of(*made, &ends)) return false;
    const Number size = size_of(node.bits);
    const Bounds all = between(node.low, node.low + size - 1);
    if (ends.known()) {
        const Number around = (ends.low - node.low) >> node.bits;
        if ((ends.high - node.low) >> node.bits == around)
            return move(made, -around * size) || lose();
        return unknown(all, made);
    }
    return unknown(node.bits <= 31 ? all : Bounds{}, made);
}

bool Evaluation::quotient(const table::Node& node, Sum* made) {
    const Sum* const inner = this->node(node.one);
    if (!inner) return false;
    if (inner->base != kNoBase) return lose();
    *made = *inner;
    if (divide(made, node.low)) return true;
    Bounds ends;
    if (!bounds_of(*inner, &ends)) return false;
    ends.low = floor_of(ends.low, node.low);
    ends.high = floor_of(ends.high, node.low);
    if (!unknown(ends, made)) return false;
    Sum rest = *inner;
    if (!add(&rest, *made, -node.low)) return lose();
    if (!hold(rest)) return false;
    if (!multiply(&rest, -1) || !move(&rest, node.low - 1)) return lose();
    return hold(rest);
}

bool Evaluation::as_word(const Sum& sum, Number least, unsigned bits, bool* found, Sum* made,
                         Bounds* ends) {
    *made = sum;
    *found = false;
    if (!reduce(made, bits)) return lose();
    if (!bounds_of(*made, ends)) return false;
    if (!ends->known() || (ends->low - least) >> bits != (ends->high - least) >> bits) return true;
    const Number by = -((ends->low - least) >> bits) * size_of(bits);
    ends->low += by;
    ends->high += by;
    *found = true;
    return move(made, by) || lose();
}

// Neither word is less than the bits that both have.
bool Evaluation::common(const table::Node& node, Sum* made) {
    Number least = node.low;
    Sum words[2];
    bool found[2] = {};
    const uint32_t inner[2] = {node.one, node.other};
    for (int i = 0; i < 2; ++i) {
        const Sum* const one = this->node(inner[i]);
        Bounds ends;
        if (!one || !as_word(*one, 0, 32, &found[i], &words[i], &ends)) return false;
        if (found[i]) least = std::min(least, ends.high);
    }
    if (!unknown(least < size_of(31) ? between(0, least) : Bounds{}, made)) return false;
    for (int i = 0; i < 2; ++i) {
        if (!found[i]) continue;
        if (!add(&words[i], *made, -1)) return lose();
        if (!hold(words[i])) return false;
    }
    return true;
}

bool Evaluation::choice(const table::Node& node, Sum* made) {
    uint64_t taken = 0;
    if (has(chosen_, node.one))
        taken = uint64_t{1} << chosen_.values[node.one];
    else
        taken = places(node.one);
    if (state_ != State::fine || !taken) return lose();
    if (taken & (taken - 1)) return hull(node, taken, made);
    const Sum* const only =
        this->node(view_.refs[node.at + static_cast<uint32_t>(__builtin_ctzll(taken))]);
    if (!only) return false;
    *made = *only;
    return true;
}

// Any of these alternatives, which must have the same base.
bool Evaluation::hull(const table::Node& node, uint64_t places, Sum* made) {
    Bounds within{true, true, 0, 0};
    uint32_t base = kNoBase;
    bool first = true;
    for (uint32_t place = 0; place < node.count; ++place) {
        if (!(places >> place & 1)) continue;
        const Sum* const one = this->node(view_.refs[node.at + place]);
        Bounds ends;
        if (!one || !bounds_of(*one, &ends)) return false;
        if (!first && one->base != base) return lose();
        base = one->base;
        within.has_low &= ends.has_low;
        within.has_high &= ends.has_high;
        within.low = first ? ends.low : std::min(within.low, ends.low);
        within.high = first ? ends.high : std::max(within.high, ends.high);
        first = false;
    }
    if (!unknown(within, made)) return false;
    made->base = base;
    return true;
}

// Other facts may hold of another thread, and it may be in another iteration.
bool Evaluation::elsewhere(const table::Node& node, Sum* made) {
    Bounds within;
    if (inner_) {
        inner_->begin(view_, launch_, budget_, deciding_);
        const Sum* const other = inner_->node(node.one);
        if (other && other->base == kNoBase) inner_->bounds_of(*other, &within);
        if (inner_->state_ == State::impossible) return contradict();
        if (inner_->state_ != State::fine || !other || other->base != kNoBase) within = {};
    }
    return unknown(within, made);
}

bool Evaluation::extreme(const table::Node& node, Sum* made) {
    const Number sign = node.kind == table::kGreatest ? 1 : -1;
    Bounds within{false, true, 0, 0};
    for (uint32_t i = 0; i < node.count; ++i) {
        const Sum* const one = this->node(view_.refs[node.at + i]);
        if (!one) return false;
        Sum turned = *one;
        Bounds ends;
        if (!multiply(&turned, sign)) return lose();
        if (!bounds_of(turned, &ends)) return false;
        if (ends.has_low) {
            within.low = within.has_low ? std::max(within.low, ends.low) : ends.low;
            within.has_low = true;
        }
        within.has_high &= ends.has_high;
        within.high = i ? std::max(within.high, ends.high) : ends.high;
    }
    if (sign < 0) within = {within.has_high, within.has_low, -within.high, -within.low};
    if (!unknown(within, made)) return false;
    for (uint32_t i = 0; i < node.count; ++i) {
        Sum rest = *made;
        if (!add(&rest, *this->node(view_.refs[node.at + i]), -1) || !multiply(&rest, sign))
            return lose();
        if (!hold(rest)) return false;
    }
    return true;
}

}  // namespace phos::ranges
