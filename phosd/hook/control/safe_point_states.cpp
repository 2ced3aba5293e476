#include "control/safe_point_states.h"

namespace phos::safe_points {

using S = State;
using E = Event;

// One rule for each state and event; an event without a rule changes nothing.
const Rule kRules[] = {
    // -- a thread's wait
    {S::free, E::comes_to_point, S::at_point},
    {S::free, E::comes_to_ask, S::asks_anew},
    {S::asks_anew, E::cannot_ask, S::failed},

    {S::at_point, E::goes_on, S::nothing, kHere | kOpen | kUnwanted},
    {S::at_point_in_image, E::goes_on, S::stopped, kHere | kOpen | kUnwanted},
    {S::at_point, E::passes, S::nothing, kHere | kOpen},
    {S::at_point_in_image, E::passes, S::nothing, kHere | kOpen},

    {S::at_point, E::stops, S::at_point_in_image},
    {S::asks_anew, E::stops, S::asks_anew_in_image},
    {S::asks, E::stops, S::asks_in_image},

    {S::at_point_in_image, E::is_restored, S::restored},
    {S::asks_anew_in_image, E::is_restored, S::restored},
    {S::asks_in_image, E::is_restored, S::restored},
    {S::asks, E::is_restored, S::asks_anew},  // this phosd has never heard of it

    {S::asks_anew, E::joins, S::asks},
    {S::asks_anew_in_image, E::joins, S::asks_in_image},
    {S::asks, E::saves, S::asks_anew},  // it came after the stop
    {S::asks_in_image, E::saves, S::saved},
    {S::asks_anew_in_image, E::saves_too, S::saved},
    {S::asks_in_image, E::saves_too, S::saved},
    {S::asks, E::fails, S::failed},
    {S::asks_in_image, E::fails, S::failed},
    {S::asks, E::wish_fails, S::failed},
    {S::asks_in_image, E::wish_fails, S::failed},
    {S::asks, E::wish_in_vain, S::nothing},
    {S::asks_in_image, E::wish_in_vain, S::nothing},

    {S::at_point, E::leaves, S::free},
    {S::at_point_in_image, E::leaves, S::free},
    {S::asks_anew, E::leaves, S::free},
    {S::asks_anew_in_image, E::leaves, S::free},
    {S::asks, E::leaves, S::free},
    {S::asks_in_image, E::leaves, S::free},
    {S::nothing, E::leaves, S::free},
    {S::saved, E::leaves, S::free},
    {S::restored, E::leaves, S::free},
    {S::stopped, E::leaves, S::free},
    {S::failed, E::leaves, S::free},

    // -- the wish
    {S::no_wish, E::wished, S::untold},
    {S::untold, E::tells, S::telling, kHere},
    {S::telling, E::heard, S::told},
    {S::telling, E::not_heard, S::no_wish, 0, E::wish_fails},
    {S::telling, E::nobody_there, S::no_wish, 0, E::wish_in_vain},
    {S::told, E::phosd_lost, S::no_wish, kHere, E::wish_fails},

    {S::untold, E::unwished, S::no_wish},
    {S::told, E::unwished, S::no_wish},
    {S::telling, E::unwished, S::dropped},
    {S::dropped, E::wished, S::dropped_untold},
    {S::dropped_untold, E::unwished, S::dropped},
    {S::dropped, E::heard, S::no_wish},
    {S::dropped, E::not_heard, S::no_wish},
    {S::dropped, E::nobody_there, S::no_wish},
    {S::dropped_untold, E::heard, S::untold},
    {S::dropped_untold, E::not_heard, S::untold},
    {S::dropped_untold, E::nobody_there, S::untold},

    // -- the process
    {S::here, E::detaches, S::leaving},
    {S::leaving, E::cannot_detach, S::here},
    {S::leaving, E::has_detached, S::detached, kSilent, E::stops},
    {S::detached, E::wakes, S::here},
    {S::detached, E::wakes_restored, S::woken},
    {S::woken, E::has_detached, S::woken, 0, E::stops},
    {S::woken, E::gate_opens, S::here, 0, E::is_restored},
    {S::woken, E::nobody_opens, S::here, kOpen, E::is_restored},

    // -- whether a client waits for a safe point
    {S::unwanted, E::wants, S::wanted},
    {S::refused, E::wants, S::wanted},
    {S::given_up, E::wants, S::wanted},
    {S::wanted, E::refuses, S::refused},
    {S::refused, E::refuses, S::refused},  // its words are the latest
    {S::wanted, E::wants_no_more, S::unwanted},
    {S::refused, E::wants_no_more, S::given_up},
    {S::wanted, E::has_detached, S::unwanted, kSilent},  // its connection ends
    {S::refused, E::has_detached, S::given_up, kSilent},

    {S::free, E::none, S::free},
};

bool Machine::waiting(size_t thread) const {
    return waits_[thread] != S::free && !ended(thread);
}

bool Machine::ended(size_t thread) const {
    return waits_[thread] >= S::nothing && waits_[thread] <= S::failed;
}

bool Machine::at_point(size_t thread) const {
    return waits_[thread] == S::at_point || waits_[thread] == S::at_point_in_image;
}

bool Machine::shares(size_t thread) const {
    return waits_[thread] == S::asks || waits_[thread] == S::asks_in_image;
}

bool Machine::wants_share(size_t thread) const {
    return waits_[thread] == S::asks_anew || waits_[thread] == S::asks_anew_in_image;
}

bool Machine::has_wish() const {
    return wish_ != S::no_wish && wish_ != S::dropped;
}

bool Machine::talks() const {
    return wish_ == S::telling || wish_ == S::dropped || wish_ == S::dropped_untold;
}

bool Machine::has_client() const {
    return want_ == S::wanted || want_ == S::refused;
}

bool Machine::was_refused() const {
    return want_ == S::refused || want_ == S::given_up;
}

bool Machine::depends_on_phosd(size_t thread, bool gate_open) const {
    return shares(thread) && wish_ == S::told && process_ == S::here && gate_open;
}

bool Machine::happens(Event event, bool gate_open) {
    Event then = E::none;
    bool any = move(&process_, event, gate_open, &then);
    any |= move(&want_, event, gate_open, &then);
    any |= move(&wish_, event, gate_open, &then);
    for (size_t i = 0; i < count_; ++i)
        if (waits_[i] != S::free) any |= move(&waits_[i], event, gate_open, &then);
    if (then != E::none) happens(then, gate_open);
    drop_what_nobody_wants();
    return any;
}

bool Machine::happens_to(size_t thread, Event event) {
    Event then = E::none;
    const bool any = move(&waits_[thread], event, false, &then);
    drop_what_nobody_wants();
    return any;
}

bool Machine::joins(size_t thread, bool same) {
    Event then = E::none;
    if (!wants_share(thread)) return false;
    if (!has_wish())
        move(&wish_, E::wished, false, &then);
    else if (!same)
        return false;
    return happens_to(thread, E::joins);
}

bool Machine::tells(size_t thread) {
    Event then = E::none;
    return shares(thread) && move(&wish_, E::tells, false, &then);
}

// Moves one part. A rule's needs are those of the moment: no event changes what its own rules need.
bool Machine::move(State* state, Event event, bool gate_open, Event* then) const {
    for (const Rule* rule = rules_; rule->on != E::none; ++rule) {
        if (rule->from != *state || rule->on != event) continue;
        if (!holds(rule->needs, gate_open)) return false;
        *state = rule->to;
        if (rule->then != E::none) *then = rule->then;
        return true;
    }
    return false;
}

bool Machine::holds(uint8_t needs, bool gate_open) const {
    return (!(needs & kHere) || process_ == S::here) && (!(needs & kOpen) || gate_open) &&
           (!(needs & kUnwanted) || !has_client()) && (!(needs & kSilent) || !talks());
}

void Machine::drop_what_nobody_wants() {
    if (!has_wish()) return;
    for (size_t i = 0; i < count_; ++i)
        if (shares(i)) return;
    Event then = E::none;
    move(&wish_, E::unwished, false, &then);
}

}  // namespace phos::safe_points
