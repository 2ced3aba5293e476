#include "park/quiesce.h"

#include <algorithm>

#include "base/process.h"
#include "gate/gate.h"
#include "memory/contexts.h"
#include "park/park.h"

namespace phos::quiesce {

std::mutex turn;

namespace {

constexpr uint64_t kLongestSlice = 2'000'000;  // nanoseconds spent on one request
constexpr uint64_t kPatience = 1'000'000;      // a call that takes longer is waiting for something
constexpr long kPause = 30'000;

// Incremented by everything that may have submitted work since a context was last asked.
uint64_t epoch = 1;
uint64_t last_admission = 0;
uint64_t inside_since = 0;
uint64_t busy_since = 0;
uint64_t slow_admissions = 0;

// Returns whether to admit one more call to a device that is busy. The device may be waiting for
// it; but if each such call were admitted, a program that never pauses would keep the device busy
// for ever. So their number grows as the cube root of the time, and the queue runs dry in the end:
// in 10 s also when each call takes 100 ms. As many as threads are held come sooner, since it may
// be any of them.
bool slow_admission_is_due(uint64_t now, uint64_t held) {
    const double milliseconds = static_cast<double>(now - busy_since) / 1e6;
    const auto made = static_cast<double>(slow_admissions + 1);
    if (slow_admissions < held) return made * made <= 4 * milliseconds;
    return made * made * made <= 8 * milliseconds;
}

}  // namespace

void begin() {
    ++epoch;  // an answer from an earlier closing says nothing about later work
    busy_since = monotonic_ns();
    inside_since = 0;
    slow_admissions = 0;
}

wire::GateState advance(uint64_t slice_ns, uint32_t for_peers) {
    const uint64_t end = monotonic_ns() + std::min(slice_ns, kLongestSlice);
    uint32_t left = for_peers;
    wire::GateState state{};
    for (;;) {
        const gate::View view = gate::view();
        if (view.state == wire::State::running) break;  // the deadline has passed
        const uint64_t now = monotonic_ns();
        // Also in the round that finds the last call gone: it may have submitted work after the
        // context was asked in the round before.
        if (view.inside || inside_since) ++epoch;
        if (!view.inside)
            inside_since = 0;
        else if (!inside_since)
            inside_since = now;
        // Once settled, it stays so until a call is admitted. Asking again would make a context
        // look busy until it has answered, and admit calls that no device waits for. While a call
        // is inside, the driver may not answer before the device has done what the call waits for.
        const bool settled = view.state == wire::State::closed && !view.inside;
        const contexts::Activity activity = settled       ? contexts::Activity::idle
                                            : view.inside ? contexts::known_activity()
                                                          : contexts::activity(epoch);
        const bool at_rest = !view.inside && activity == contexts::Activity::idle;
        state.busy = !at_rest;
        if (at_rest && !for_peers) {
            state.settled = gate::settle();
            break;
        }
        if (at_rest && !left) break;  // the peers may be idle by now
        const bool turn = !view.admitted_inside || now - last_admission > kPatience;
        if (view.waiting && turn) {
            bool admitted = false;
            if (activity == contexts::Activity::capturing || (at_rest && left)) {
                admitted = gate::admit_oldest(nullptr);
            } else if (!at_rest) {
                const bool busy = activity == contexts::Activity::busy;
                // An idle device may be what the busy one waits for.
                admitted = busy && gate::admit_oldest(contexts::is_idle);
                // If it is not known whether one is busy, the next round knows, unless a call is
                // inside.
                if (!admitted && (busy || inside_since) &&
                    slow_admission_is_due(now, view.waiting) &&
                    (!inside_since || now - inside_since > kPatience)) {
                    admitted = gate::admit_oldest(nullptr);
                    slow_admissions += admitted;
                }
            }
            if (admitted) {
                ++epoch;
                last_admission = now;
                if (left) --left;
            }
        }
        if (now > end) break;
        pause_for(kPause);
    }
    const gate::View view = gate::view();
    state.waiting = view.waiting;
    state.admitted = view.admitted;
    state.capturing = contexts::captures();
    park::newest(&state.last_id, &state.freed);
    return state;
}

Stop::Stop(uint32_t deadline_ms) : turn_(turn) {
    while (gate::state() != wire::State::running) {
        turn_.unlock();
        {
            const gate::Pass until_it_opens;
        }
        turn_.lock();
    }
    begin();
    if (!gate::close(deadline_ms)) return;
    while (!settled_ && gate::state() != wire::State::running)
        settled_ = advance(kLongestSlice, 0).settled != 0;
    gate::take_expired();  // of no interest to a client
}

Stop::~Stop() {
    if (settled_) gate::open();
}

}  // namespace phos::quiesce
