// What follows from conditions, and whether they hold.
#include <utility>

#include "ranges/comparisons.h"
#include "ranges/evaluation.h"

namespace phos::ranges {

using table::How;

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
        const uint32_t* const list = view_.refs + one.at + size_t{2} * way;
        bool fits = true;
        for (uint32_t i = 0; i < list[1] && fits; ++i)
            fits = holds(view_.conditions[view_.refs[list[0] + i]]) != 0;
        found |= uint64_t{fits} << way;
    }
    return found ? found : all;
}

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
    state_ = State::fine;  // an undecidable condition must not fail the evaluation
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

}  // namespace phos::ranges
