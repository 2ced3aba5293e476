#include "ranges/evaluation.h"

#include <algorithm>
#include <utility>

namespace phos::ranges {
namespace {

constexpr uint32_t kThreadsOfWarp = 32;
constexpr uint32_t kLane = 6;
constexpr uint32_t kStepsOfNode = 4;

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
