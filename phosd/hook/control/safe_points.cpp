#include "control/safe_points.h"

#include <linux/futex.h>
#include <phos.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/process.h"
#include "control/phosd_socket.h"
#include "control/safe_point_states.h"
#include "control/undisturbed.h"
#include "gate/gate.h"
#include "memory/contexts.h"

namespace phos::safe_points {
namespace {

using phosd_socket::Daemon;

constexpr int kNoClient = -1;
constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kTalkEnds = 10 * kSecond;  // more than a thread's talk with phosd can take
constexpr uint64_t kNobodyOpens = 10 * kSecond;
constexpr uint64_t kLeft = 10 * kSecond;  // an interpreter's thread may be interrupted before it
                                          // could say that it leaves

// A thread's wait, whose state the machine has. It goes on while the thread is back in the program
// for a moment, as an interpreter that looks for signals is.
struct Wait {
    uint64_t ticket;
    uint64_t until;  // when it counts as left if the thread has not come back
    uint32_t then;
    char name[PHOS_NAME_BYTES];  // of the image that it asks for; empty: the program's
    char why[PHOS_WHY_BYTES];
    std::atomic<int> over;  // the futex that the thread sleeps on: 1 once the wait has ended
};

// The latest checkpoint that threads have asked for.
struct Wish {
    uint64_t number;
    uint32_t then;
    char name[PHOS_NAME_BYTES];
};

std::mutex mutex;  // guards what follows; never held during a wait or a call that may take long
Machine machine(kMaxWaiting);
Wait waits[kMaxWaiting];
uint64_t last_ticket = 0;
Wish wish{};
Daemon daemon{};  // that was told of it
int client_that_wants = kNoClient;
char refusal[sizeof wire::ProgramState{}.reason];
uint64_t started_at = 0;  // the process's start when it was detached: a restored one has another
uint64_t woken_at = 0;    // of the process that was restored last

// What the program may look at as often as it likes.
std::atomic<bool> wanted{false};
std::atomic<bool> declared{false};

// Held while the machine is told of something. At its end the threads whose waits have ended by
// that are woken, so that no end is forgotten, and have the reason in `why`.
class Turn {
  public:
    Turn() = default;
    ~Turn() {
        wanted.store(machine.has_client(), std::memory_order_relaxed);
        for (size_t i = 0; i < kMaxWaiting; ++i)
            if (machine.ended(i) && !waits[i].over.load(std::memory_order_relaxed)) wake(waits[i]);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    const char* why = "";

  private:
    void wake(Wait& wait) const {
        std::snprintf(wait.why, sizeof wait.why, "%s", why);
        wait.over.store(1, std::memory_order_release);
        syscall(SYS_futex, &wait.over, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, nullptr, nullptr, 0);
    }
    const std::lock_guard<std::mutex> lock_{mutex};
};

// The rest of this part is called with a Turn.

bool gate_is_open() {
    return gate::state() == wire::State::running;
}

// Lets the threads at a safe point go on, if nobody waits for it any more.
void release() {
    machine.happens(Event::goes_on, gate_is_open());
}

// Returns the place of a ticket; kMaxWaiting if there is no such ticket.
size_t place_of(uint64_t ticket) {
    for (size_t i = 0; i < kMaxWaiting; ++i)
        if (machine.wait(i) != State::free && waits[i].ticket == ticket) return i;
    return kMaxWaiting;
}

bool wish_is(uint32_t then, const char* name) {
    return machine.has_wish() && wish.then == then && std::strcmp(wish.name, name) == 0;
}

// Gives the thread a share in the wish, unless that is for something else.
void join(size_t thread) {
    const Wait& wait = waits[thread];
    const bool first = !machine.has_wish();
    if (!machine.joins(thread, wish_is(wait.then, wait.name)) || !first) return;
    ++wish.number;
    wish.then = wait.then;
    std::memcpy(wish.name, wait.name, sizeof wish.name);
}

int outcome_of(State state) {
    switch (state) {
        case State::saved:
            return PHOS_SAVED;
        case State::restored:
            return PHOS_RESTORED;
        case State::stopped:
            return PHOS_STOPPED;
        case State::failed:
            return PHOS_FAILED;
        default:
            return PHOS_NOTHING;
    }
}

// The rest of this part runs without the mutex, in threads of the program.

void tell_phosd_of(const Wish& told) {
    Daemon found{};
    char why[PHOS_WHY_BYTES] = "";
    const int outcome =
        phosd_socket::tell(told.number, told.then, told.name, &found, why, sizeof why);
    Turn turn;
    turn.why = why;
    // It changes nothing if all who asked have left meanwhile, or if it was answered already.
    machine.happens(outcome == PHOS_WAITING   ? Event::heard
                    : outcome == PHOS_NOTHING ? Event::nobody_there
                                              : Event::not_heard);
    if (machine.wish() == State::told) daemon = found;
}

void look_for_phosd(uint64_t number, const Daemon& known) {
    if (!phosd_socket::is_gone(known)) return;
    Turn turn;
    turn.why =
        "NoSuchProcess: phosd ended, or was restarted, while it was to save this process; "
        "`phos images` tells whether the image is complete";
    if (wish.number == number) machine.happens(Event::phosd_lost);
}

// The first part of a wait: asks phosd, if it is for this thread to do. Returns the place of the
// ticket, as place_of().
size_t begin_to_wait(uint64_t ticket, int milliseconds) {
    const Undisturbed thread;
    Wish told{};
    size_t place = kMaxWaiting;
    {
        const Turn turn;
        place = place_of(ticket);
        if (place == kMaxWaiting) return place;
        waits[place].until =
            monotonic_ns() + static_cast<uint64_t>(milliseconds) * 1'000'000 + kLeft;
        join(place);
        release();
        if (!machine.tells(place)) return place;
        told = wish;
    }
    tell_phosd_of(told);
    return place;
}

// The last part: looks whether phosd still knows of it.
int end_of_wait(size_t place, char* why, size_t size) {
    const Undisturbed thread;
    Daemon known{};
    uint64_t number = 0;
    {
        const Turn turn;
        if (machine.depends_on_phosd(place, gate_is_open())) number = wish.number;
        known = daemon;
    }
    if (number) look_for_phosd(number, known);
    const Turn turn;
    if (machine.waiting(place)) return PHOS_WAITING;
    if (why && size) std::snprintf(why, size, "%s", waits[place].why);
    return outcome_of(machine.wait(place));
}

}  // namespace

wire::ProgramState state() {
    const Turn turn;
    wire::ProgramState said{};
    said.declared = declared.load(std::memory_order_relaxed);
    said.refused = machine.was_refused();
    said.wish = machine.has_wish() ? wish.number : 0;
    std::memcpy(said.reason, refusal, sizeof said.reason);
    const uint64_t now = monotonic_ns();
    for (size_t i = 0; i < kMaxWaiting; ++i)
        said.waiting += machine.waiting(i) && now < waits[i].until;
    return said;
}

void want(int client) {
    const Turn turn;
    client_that_wants = client;
    refusal[0] = 0;
    machine.happens(Event::wants);
}

void client_lost(int client) {
    const Turn turn;
    if (client != client_that_wants) return;
    client_that_wants = kNoClient;
    machine.happens(Event::wants_no_more);
    release();
}

void pass() {
    const Turn turn;
    machine.happens(Event::passes, gate_is_open());
}

void answer(const wire::ProgramAsk& told) {
    char text[PHOS_WHY_BYTES];
    std::snprintf(text, sizeof text, "%.*s", static_cast<int>(sizeof told.text), told.text);
    const bool saved = told.outcome == PHOS_SAVED;
    Turn turn;
    if (told.wish) {
        if (!saved) turn.why = text;
        if (machine.has_wish() && told.wish == wish.number)
            machine.happens(saved ? Event::saves : Event::fails);
        return;
    }
    for (size_t i = 0; saved && i < kMaxWaiting; ++i)
        if (waits[i].then == told.then && std::strcmp(waits[i].name, text) == 0)
            machine.happens_to(i, Event::saves_too);
}

void stopped() {
    const Turn turn;
    machine.happens(Event::stops);
}

bool detach() {
    {
        const Turn turn;
        machine.happens(Event::detaches);
    }
    const uint64_t start = began(getpid());
    const uint64_t until = monotonic_ns() + kTalkEnds;
    for (;; pause_for(1'000'000)) {
        const Turn turn;
        if (machine.happens(Event::has_detached)) {
            started_at = start;
            client_that_wants = kNoClient;
            return true;
        }
        if (monotonic_ns() > until) {
            machine.happens(Event::cannot_detach);
            return false;
        }
    }
}

void awake() {
    const uint64_t now_started_at = began(getpid());
    const Turn turn;
    const bool is_restored = now_started_at != started_at;
    if (is_restored) woken_at = monotonic_ns();
    machine.happens(is_restored ? Event::wakes_restored : Event::wakes);
    release();
}

void gate_opened() {
    const Turn turn;
    machine.happens(Event::gate_opens);
    release();
}

void tidy() {
    const Turn turn;
    // A phosd that was killed has left the restored program running.
    if (monotonic_ns() > woken_at + kNobodyOpens)
        machine.happens(Event::nobody_opens, gate_is_open());
    release();
}

// -- what the program calls ------------------------------------------------------------------

#pragma GCC visibility push(default)
extern "C" {

phos_program_wanted_t phos_program_wanted;
phos_program_declare_t phos_program_declare;
phos_program_refuse_t phos_program_refuse;
phos_program_begin_t phos_program_begin;
phos_program_begin_named_t phos_program_begin_named;
phos_program_wait_t phos_program_wait;
phos_program_leave_t phos_program_leave;

int phos_program_wanted() {
    if (!declared.load(std::memory_order_relaxed)) declared.store(true, std::memory_order_relaxed);
    return wanted.load(std::memory_order_relaxed) && active();
}

void phos_program_declare(int has_safe_points) {
    declared.store(has_safe_points != 0, std::memory_order_relaxed);
}

void phos_program_refuse(const char* why) {
    if (!active()) return;
    const Undisturbed thread;
    const Turn turn;
    if (machine.happens(Event::refuses))
        std::snprintf(refusal, sizeof refusal, "%s", why ? why : "");
}

uint64_t phos_program_begin(int kind, int then) {
    return phos_program_begin_named(kind, then, nullptr);
}

uint64_t phos_program_begin_named(int kind, int then, const char* name) {
    if (!name) name = "";
    const bool too_long = strnlen(name, PHOS_NAME_BYTES) == PHOS_NAME_BYTES;
    if (!active() || then < PHOS_RUN || then > PHOS_HOLD) return 0;
    const Undisturbed thread;
    const bool asks = kind != PHOS_AT_SAFE_POINT;
    const bool capturing = contexts::captures() != 0;
    if (capturing && !asks) return 0;  // no safe point: no stream can be saved now
    Turn turn;
    if (kind == PHOS_JOINS && (too_long || !wish_is(static_cast<uint32_t>(then), name))) return 0;
    size_t place = 0;
    while (!machine.happens_to(place, asks ? Event::comes_to_ask : Event::comes_to_point))
        if (++place == kMaxWaiting) return 0;
    Wait& wait = waits[place];
    wait.ticket = ++last_ticket;
    wait.until = monotonic_ns() + kLeft;
    wait.then = static_cast<uint32_t>(then);
    std::snprintf(wait.name, sizeof wait.name, "%s", name);
    wait.over.store(0, std::memory_order_relaxed);
    if (too_long || capturing) {
        turn.why = too_long ? "InvalidOption: the name of an image has at most 63 characters"
                            : "Unsupported: a stream capture is under way; ask when it has ended";
        machine.happens_to(place, Event::cannot_ask);
    } else {
        join(place);
    }
    return wait.ticket;
}

int phos_program_wait(uint64_t ticket, int milliseconds, char* why, size_t size) {
    if (!active()) return PHOS_NOTHING;
    milliseconds = std::clamp(milliseconds, 0, 60'000);
    const size_t place = begin_to_wait(ticket, milliseconds);
    if (place == kMaxWaiting) return PHOS_NOTHING;
    std::atomic<int>& over = waits[place].over;
    if (!over.load(std::memory_order_acquire)) {
        const KeepErrno keep;
        const timespec time{milliseconds / 1000, milliseconds % 1000 * 1'000'000l};
        // Returns early for a signal, which an interpreter looks at then.
        syscall(SYS_futex, &over, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, 0, &time, nullptr, 0);
    }
    return end_of_wait(place, why, size);
}

void phos_program_leave(uint64_t ticket) {
    if (!active()) return;
    const Undisturbed thread;
    const Turn turn;
    // If nobody shares the wish any more, phosd's job finds that it is gone.
    if (const size_t place = place_of(ticket); place != kMaxWaiting)
        machine.happens_to(place, Event::leaves);
}
}
#pragma GCC visibility pop

}  // namespace phos::safe_points
