// A model of everything around the states of safe points: two threads of a program, its hook's
// thread, CRIU, and a phosd that answers, ends and comes again. Each step here is one there: a
// passage under the mutex, or what somebody else does meanwhile.
//
// Beside the machine under test the model keeps what is true: who waits for what, through which
// stop, who has heard of it. Every step says what must come of that, and `wrong` what else did.
#pragma once

#include <cstdint>
#include <string>

#include "control/safe_point_states.h"

namespace phos::test {

using safe_points::Event;
using safe_points::Machine;
using safe_points::Rule;
using safe_points::State;

constexpr size_t kThreads = 2;  // at most

enum class At : uint8_t { out, inside, talking, talked, asleep, looking };
enum class Said : uint8_t { nothing_yet, yes, no, nobody };
enum class Hook : uint8_t { here, leaving, detached };

// A thread of the program, and what is true of its wait.
struct Thread {
    At at = At::out;
    bool asks = false;     // else it is at a safe point
    uint8_t then = 0;      // what it asks for
    bool in_stop = false;  // it has waited through a stop
    bool shares = false;   // in the wish
    State end = State::free;
    // Whether its talk with phosd, and its look whether phosd lives, are about the latest wish.
    bool talks_of_latest = false;
    bool looks_for_latest = false;
    Said said = Said::nothing_yet;

    bool waits() const { return at != At::out && end == State::free; }
};

struct World {
    World(const Rule* rules, size_t thread_count)
        : machine(thread_count, rules), count(thread_count) {}

    Machine machine;
    size_t count;
    Thread threads[kThreads];
    Hook hook = Hook::here;
    bool restored = false;  // by CRIU, and nobody has opened its gate yet
    bool open = true;       // the gate
    bool client = false;    // waits for a safe point
    bool refused = false;   // the program, since then
    uint8_t then = 0;       // of the latest wish
    bool heard = false;     // phosd has heard the latest wish
    bool told = false;      // and the thread that told it knows that
    bool alive = true;      // phosd
    bool knows = false;     // phosd works on the latest wish, for this process
    bool hearer_gone = false;
    const char* wrong = nullptr;

    // All that distinguishes two worlds.
    std::string key() const;
    bool present() const { return hook == Hook::here && !restored; }
    bool all_out() const;

    // -- threads of the program; false if there is no such step now
    bool begin(size_t thread, bool asks, uint8_t then, bool possible);
    bool enter(size_t thread);
    bool hear(size_t thread, Said said);
    bool end_talk(size_t thread);
    bool wake(size_t thread);
    bool look(size_t thread);
    bool leave(size_t thread);
    bool refuse();
    // -- requests of phosd
    bool want();
    bool lose_client();
    bool pass();
    bool answer(bool saved, bool latest);
    bool answer_too(uint8_t then);
    // -- what becomes of the process
    bool close_gate();
    bool stop();
    bool open_gate();
    bool begin_detaching();
    bool end_detaching();
    bool give_up_detaching();
    bool wake_hook(bool made_anew);
    bool tidy(bool long_after);
    // -- what becomes of phosd
    bool kill_phosd();
    bool start_phosd();

  private:
    void expect(bool condition, const char* otherwise) {
        if (!condition && !wrong) wrong = otherwise;
    }
    void join(size_t thread);
    void end(size_t thread, State how);
    void end_sharers(State how);
    void forget();
    void let_go();
    void become_present();
    bool any_shares() const;
    bool any_talks() const;
    // Compares the machine with what is true.
    bool check();
};

// Runs `step` with each world that one step leads to, and the step's name.
template <class Step>
void for_each_step(const World& world, Step step) {
    const auto attempt = [&](const char* name, auto act) {
        World after = world;
        if (act(after)) step(after, name);
    };
#define PHOS_STEP(call) attempt(#call, [&](World& w) { return w.call; })
    for (size_t i = 0; i < world.count; ++i) {
        PHOS_STEP(begin(i, false, 0, true));
        for (uint8_t then = 0; then < 2; ++then) PHOS_STEP(begin(i, true, then, true));
        PHOS_STEP(begin(i, true, 0, false));
        PHOS_STEP(enter(i));
        PHOS_STEP(hear(i, Said::yes));
        PHOS_STEP(hear(i, Said::no));
        PHOS_STEP(hear(i, Said::nobody));
        PHOS_STEP(end_talk(i));
        PHOS_STEP(wake(i));
        PHOS_STEP(look(i));
        PHOS_STEP(leave(i));
    }
    PHOS_STEP(refuse());
    PHOS_STEP(want());
    PHOS_STEP(lose_client());
    PHOS_STEP(pass());
    PHOS_STEP(answer(true, true));
    PHOS_STEP(answer(false, true));
    PHOS_STEP(answer(true, false));
    PHOS_STEP(answer(false, false));
    PHOS_STEP(answer_too(0));
    PHOS_STEP(answer_too(1));
    PHOS_STEP(close_gate());
    PHOS_STEP(stop());
    PHOS_STEP(open_gate());
    PHOS_STEP(begin_detaching());
    PHOS_STEP(end_detaching());
    PHOS_STEP(give_up_detaching());
    PHOS_STEP(wake_hook(false));
    PHOS_STEP(wake_hook(true));
    PHOS_STEP(tidy(false));
    PHOS_STEP(tidy(true));
    PHOS_STEP(kill_phosd());
    PHOS_STEP(start_phosd());
#undef PHOS_STEP
}

}  // namespace phos::test
