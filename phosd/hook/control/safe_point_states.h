// The states of a program's safe points and of the checkpoint that it asks for, and what moves
// them: one table. Nothing here waits, locks, talks or looks at a clock; safe_points.cpp does, and
// asks the table. docs/design/safe-points.md draws the states.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phos::safe_points {

enum class State : uint8_t {
    // A thread's wait. "In image": it has waited through a stop, so that an image made of that stop
    // has it.
    free,
    at_point,
    at_point_in_image,
    asks_anew,  // it wants a checkpoint, and has no share in the wish yet
    asks_anew_in_image,
    asks,  // it shares the wish
    asks_in_image,
    // How it has ended: a phos_outcome each. The thread has not left yet.
    nothing,
    saved,
    restored,
    stopped,
    failed,

    // The wish: the checkpoint that threads of the program ask for.
    no_wish,
    untold,
    telling,  // a thread talks to phosd about it
    told,
    dropped,         // nobody wants it any more; the thread talks about it still
    dropped_untold,  // and there is another wish meanwhile

    // The process.
    here,
    leaving,   // it is to be detached as soon as no thread talks to phosd
    detached,  // CRIU must meet no socket
    woken,     // CRIU has made it, and nobody has opened its gate yet; it may be detached again

    // Whether a client waits for a safe point.
    unwanted,
    wanted,
    refused,   // a callable of the program has failed
    given_up,  // nobody waits any more; the refusal can be read still
};

enum class Event : uint8_t {
    none,
    // A thread of the program, about its own wait.
    comes_to_point,
    comes_to_ask,
    cannot_ask,
    joins,
    leaves,
    // The wish.
    wished,
    tells,  // a thread connects to phosd
    heard,  // how that has ended
    not_heard,
    nobody_there,
    phosd_lost,  // the phosd that has heard the wish is gone
    unwished,    // no thread shares it any more
    // phosd's answers: to the wish, or about an image of others, to each thread that it serves.
    saves,
    fails,
    saves_too,
    // Safe points.
    wants,
    refuses,
    wants_no_more,
    passes,   // those at a safe point go on to the next one
    goes_on,  // looks whether those at a safe point may go on
    // The process.
    stops,
    detaches,
    has_detached,
    cannot_detach,
    wakes,
    wakes_restored,
    gate_opens,
    nobody_opens,  // for so long that nobody will
    // What follows from others.
    is_restored,
    wish_fails,
    wish_in_vain,  // there is no phosd
};

// What a rule needs besides its state and its event.
constexpr uint8_t kHere = 1;      // the process is `here`
constexpr uint8_t kOpen = 2;      // its gate is open
constexpr uint8_t kUnwanted = 4;  // no client waits for a safe point
constexpr uint8_t kSilent = 8;    // no thread talks to phosd

struct Rule {
    State from;
    Event on;
    State to;
    uint8_t needs = 0;
    Event then = Event::none;  // what all parts are told afterwards
};
extern const Rule kRules[];  // the last one is on Event::none

constexpr size_t kMaxWaiting = 256;

class Machine {
  public:
    // For `waits` threads, at most kMaxWaiting.
    explicit constexpr Machine(size_t waits, const Rule* rules = kRules)
        : count_(waits), rules_(rules) {}

    State wait(size_t thread) const { return waits_[thread]; }
    State wish() const { return wish_; }
    State process() const { return process_; }
    State want() const { return want_; }

    bool waiting(size_t thread) const;
    bool ended(size_t thread) const;
    bool at_point(size_t thread) const;
    bool shares(size_t thread) const;  // in the wish
    bool wants_share(size_t thread) const;
    bool has_wish() const;
    bool talks() const;
    bool has_client() const;   // which waits for a safe point
    bool was_refused() const;  // at a safe point, since a client waited last
    // Whether the thread depends on a phosd that has heard it, and that may be gone.
    bool depends_on_phosd(size_t thread, bool gate_open) const;

    // Tells all parts of an event. Returns whether there was a rule for it.
    bool happens(Event event, bool gate_open = false);
    // The same, of one thread's wait alone.
    bool happens_to(size_t thread, Event event);
    // Has the thread share the wish, if it wants to, and is the first or wants the `same`. Returns
    // whether it shares it now.
    bool joins(size_t thread, bool same);
    // Returns whether the thread is to tell phosd of the wish: one of those that share it does.
    bool tells(size_t thread);

  private:
    bool move(State* state, Event event, bool gate_open, Event* then) const;
    bool holds(uint8_t needs, bool gate_open) const;
    void drop_what_nobody_wants();

    State waits_[kMaxWaiting] = {};
    State wish_ = State::no_wish;
    State process_ = State::here;
    State want_ = State::unwanted;
    size_t count_;
    const Rule* rules_;
};

}  // namespace phos::safe_points
