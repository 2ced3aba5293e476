#include "ranges/evaluation.h"

#include <algorithm>
#include <utility>

namespace phos::ranges {
namespace {

using table::How;
using table::kNone;

constexpr uint32_t kThreadsOfWarp = 32;
constexpr uint32_t kLane = 6;
constexpr uint32_t kStepsOfNode = 4;

Bounds between(Number low, Number high) {
    return {true, true, low, high};
}

How opposite(How how) {
    switch (how) {
        case table::kLess:
            return table::kNotLess;
        case table::kNotLess:
            return table::kLess;
        case table::kNotMore:
            return table::kMore;
        case table::kMore:
            return table::kNotMore;
        case table::kEqual:
            return table::kUnequal;
        case table::kUnequal:
            return table::kEqual;
        default:
            return how == table::kNever ? table::kAlways : table::kNever;
    }
}

How swapped(How how) {
    switch (how) {
        case table::kLess:
            return table::kMore;
        case table::kMore:
            return table::kLess;
        case table::kNotMore:
            return table::kNotLess;
        case table::kNotLess:
            return table::kNotMore;
        default:
            return how;
    }
}

bool is_strict(How how) {
    return how == table::kLess || how == table::kMore;
}

Number size_of(unsigned bits) {
    return Number{1} << bits;
}

}  // namespace

void Evaluation::begin(const summaries::View& view, const Launch& launch, Budget* budget,
                       summaries::InputSet* deciding) {
    view_ = view;
    launch_ = launch;
    budget_ = budget;
    deciding_ = deciding;
    next();
    access_ = stamp_;
}

void Evaluation::next() {
    if (++stamp_ == 0) {  // what is old would count again
        for (Marks* const marks : {&nodes_, &chosen_, &decided_, &entered_, &counts_})
            std::fill(std::begin(marks->stamps), std::end(marks->stamps), 0);
        access_ = stamp_ = 1;
    }
    state_ = State::fine;
    depth_ = 0;
    used_ = 0;
    system_.reset(budget_);
}

bool Evaluation::lose() {
    if (state_ == State::fine) state_ = State::lost;
    return false;
}

// What holds may be left out where it is too much: a range is larger without it, not wrong.
bool Evaluation::forget() {
    if (state_ == State::lost) state_ = State::fine;
    return state_ == State::fine;
}

bool Evaluation::contradict() {
    if (state_ == State::fine) state_ = State::impossible;
    return false;
}

bool Evaluation::hold(const Sum& sum) {
    if (sum.base != kNoBase) return lose();
    return system_.hold(sum) || contradict();
}

bool Evaluation::bounds_of(const Sum& sum, Bounds* found) {
    return system_.bounds(sum, found) || contradict();
}

bool Evaluation::unknown(const Bounds& within, Sum* made) {
    if (within.known() && within.low == within.high) {
        ranges::set(made, within.low);
        return true;
    }
    uint8_t name = 0;
    if (!system_.make(within, &name)) return lose();
    ranges::set(made, 0);
    made->count = 1;
    made->factors[0] = 1;
    made->unknowns[0] = name;
    made->mask = uint64_t{1} << name;
    return true;
}

Sum* Evaluation::fresh() {
    if (used_ == kMostSums) {
        lose();
        return nullptr;
    }
    return &sums_[used_++];
}

const Sum* Evaluation::node(uint32_t at) {
    if (state_ != State::fine) return nullptr;
    if (has(nodes_, at)) return &sums_[nodes_.values[at]];
    Sum* const made = fresh();
    if (!made) return nullptr;
    if (depth_ == kDeepest || !budget_->spend(kStepsOfNode)) {
        lose();
        return nullptr;
    }
    ++depth_;
    const bool done = make(view_.nodes[at], made);
    --depth_;
    if (!done) {
        lose();  // if nothing else has happened, it did not fit
        return nullptr;
    }
    set(nodes_, at, static_cast<uint32_t>(made - sums_));
    return made;
}

bool Evaluation::make(const table::Node& node, Sum* made) {
    switch (node.kind) {
        case table::kSum:
            return sum(node, made);
        case table::kParameter:
            deciding_->add(node.one);
            ranges::set(made, launch_.inputs[node.one]);
            return true;
        case table::kPointer:
            ranges::set(made, 0);
            made->base = node.one;
            return true;
        case table::kDimension:
            ranges::set(made, launch_.sizes[node.one]);
            return true;
        case table::kThread: {
            const uint32_t threads = node.one == kLane ? kThreadsOfWarp : launch_.sizes[node.one];
            return unknown(between(0, Number{threads} - 1), made);
        }
        case table::kProduct:
            return product(node, made);
        case table::kWord:
            return word(node, made);
        case table::kQuotient:
            return quotient(node, made);
        case table::kCommon:
            return common(node, made);
        case table::kChoice:
            return choice(node, made);
        case table::kElsewhere:
            return elsewhere(node, made);
        case table::kLeast:
        case table::kGreatest:
            return extreme(node, made);
        case table::kCarried:
            return carried(node, made);
        case table::kAnything:
            return unknown(node.bits ? between(node.low, node.high) : Bounds{}, made);
    }
    return lose();
}

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

uint64_t Evaluation::places(uint32_t key) {
    if (decided_.stamps[key] == access_) return uint64_t{1} << decided_.values[key];
    const table::Key& one = view_.keys[key];
    if (one.count > 64) return 0;
    const uint64_t all = one.count == 64 ? ~0ull : (uint64_t{1} << one.count) - 1;
    if (one.kind == table::kIf) {
        const int truth = holds(view_.conditions[one.at]);
        return truth < 0 ? all : truth ? 1 : 2;
    }
    if (one.kind != table::kMeet) return all;
    uint64_t found = 0;
    for (uint32_t way = 0; way < one.count; ++way) {
        const uint32_t* const list = view_.refs + one.at + 2 * way;
        bool fits = true;
        for (uint32_t i = 0; i < list[1] && fits; ++i)
            fits = holds(view_.conditions[view_.refs[list[0] + i]]) != 0;
        found |= uint64_t{fits} << way;
    }
    return found ? found : all;
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

// Of another thread other facts may hold, and it may be in another iteration.
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

// Loops.

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

// Conditions.

void Evaluation::constrain(const table::Condition& condition, bool truth) {
    const auto how = static_cast<How>(condition.how);
    if (state_ == State::fine && how != table::kNever && how != table::kAlways &&
        !note(condition, truth ? how : opposite(how)))
        forget();
}

bool Evaluation::note(const table::Condition& condition, How how) {
    const Sum* one = node(condition.word_of_one);
    const Sum* other = one ? node(condition.word_of_other) : nullptr;
    if (!other) return false;
    const bool turned = how == table::kMore || how == table::kNotLess;
    if (turned) std::swap(one, other);
    const bool strict = is_strict(how);
    Sum rest = *other;
    if (how != table::kUnequal) {
        if (!add(&rest, *one, -1) || !move(&rest, strict ? -1 : 0)) return lose();
        if (!hold(rest)) return false;
    }
    if (how == table::kEqual) return (multiply(&rest, -1) || lose()) && hold(rest);
    return condition.is_signed || how == table::kUnequal ||
           note_between(condition, turned, *other, strict);
}

// What an unsigned comparison says of a number that may be negative: as long as it is not so
// negative that it would seem small, it is not negative.
bool Evaluation::note_between(const table::Condition& condition, bool turned, const Sum& larger,
                              bool strict) {
    const Sum* const one = node(turned ? condition.other : condition.one);
    Bounds ends;
    Bounds of_larger;
    if (!one || !bounds_of(*one, &ends) || !bounds_of(larger, &of_larger)) return false;
    if (one->base != kNoBase) return lose();
    const Number size = size_of(condition.width);
    if (!ends.known() || !of_larger.has_high || ends.high >= size) return true;
    if (ends.low <= of_larger.high - size || of_larger.high >= size) return true;
    if (!hold(*one)) return false;
    Sum rest = larger;
    if (!add(&rest, *one, -1) || !move(&rest, strict ? -1 : 0)) return lose();
    return hold(rest);
}

int Evaluation::holds(const table::Condition& condition) {
    const auto how = static_cast<How>(condition.how);
    if (how == table::kNever || how == table::kAlways) return how == table::kAlways;
    if (state_ != State::fine) return -1;
    const Sum* const one = node(condition.word_of_one);
    const Sum* const other = one ? node(condition.word_of_other) : nullptr;
    Bounds ends;
    if (other) {
        Sum rest = *other;
        if (!add(&rest, *one, -1))
            lose();
        else
            bounds_of(rest, &ends);
    }
    const bool told = other && state_ == State::fine && ends.known();
    state_ = State::fine;  // nobody is there to ask, or it is not known
    if (!told) return -1;
    const Number low = ends.low;
    const Number high = ends.high;
    const auto truth = [](bool always, bool never) { return always ? 1 : never ? 0 : -1; };
    switch (how) {
        case table::kLess:
            return truth(low > 0, high <= 0);
        case table::kNotMore:
            return truth(low >= 0, high < 0);
        case table::kMore:
            return truth(high < 0, low >= 0);
        case table::kNotLess:
            return truth(high <= 0, low > 0);
        case table::kEqual:
            return truth(low == 0 && high == 0, low > 0 || high < 0);
        default:
            return truth(low > 0 || high < 0, low == 0 && high == 0);
    }
}

Evaluation::State Evaluation::bounds(uint32_t address, uint32_t* base, Bounds* found) {
    const Sum* const one = node(address);
    if (one) {
        Sum whole = *one;
        reduce(&whole, 64);
        *base = whole.base;
        bounds_of(whole, found);
    }
    return std::exchange(state_, State::fine);
}

}  // namespace phos::ranges
