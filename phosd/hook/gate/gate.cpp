#include "gate/gate.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <deque>
#include <mutex>
#include <new>
#include <utility>

#include "base/process.h"

namespace phos::gate {

__thread Slot* own_slot __attribute__((tls_model("initial-exec"))) = nullptr;
std::atomic<uint32_t> shut{0};

namespace {

// A thread held at the gate. Its futex word becomes 1 when it may continue.
struct Waiter {
    Slot* slot;
    CUcontext context = nullptr;
    std::atomic<uint32_t> go{0};
};

std::atomic<Slot*> slots{nullptr};
pthread_key_t slot_key;

std::mutex mutex;  // guards what follows; not held while waiting
wire::State now_state = wire::State::running;
std::deque<Waiter*> waiters;
std::deque<Waiter*> askers;  // held because the gate is sealed
uint64_t admitted = 0;
Slot* last_admitted = nullptr;
uint64_t deadline = 0;  // nanoseconds, CLOCK_MONOTONIC
bool was_expired = false;

void leave_thread(void* slot) {
    own_slot = nullptr;
    // A thread that ended inside a call, by cancellation or longjmp, has left its counts behind.
    static_cast<Slot*>(slot)->depth.store(0, std::memory_order_release);
    static_cast<Slot*>(slot)->asking.store(0, std::memory_order_release);
    static_cast<Slot*>(slot)->owned.store(false, std::memory_order_release);
}

// No cancellation point, unlike the waits of pthreads, since the held call is none either.
void futex_wait(std::atomic<uint32_t>& word, const timespec* until) {
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, 0, until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
}

void release(Waiter* waiter, std::atomic<uint32_t> Slot::* count) {
    (waiter->slot->*count).store(1, std::memory_order_relaxed);
    // The waiter may end as soon as it sees the word: only the address is used afterwards.
    std::atomic<uint32_t>* word = &waiter->go;
    word->store(1, std::memory_order_release);
    syscall(SYS_futex, word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, nullptr, nullptr, 0);
}

void unseal_locked() {
    shut.fetch_and(~kSealed, std::memory_order_release);
    for (Waiter* waiter : askers) release(waiter, &Slot::asking);
    askers.clear();
}

void open_locked() {
    now_state = wire::State::running;
    shut.store(0, std::memory_order_release);
    for (Waiter* waiter : waiters) release(waiter, &Slot::depth);
    waiters.clear();
    unseal_locked();
}

void expire_locked() {
    if (now_state != wire::State::closing || monotonic_ns() < deadline) return;
    was_expired = true;
    open_locked();
}

void wait_until_admitted(Waiter& waiter) {
    timespec until{};
    {
        const std::lock_guard lock(mutex);
        expire_locked();
        if (now_state == wire::State::running) {
            waiter.slot->depth.store(1, std::memory_order_relaxed);
            return;
        }
        waiters.push_back(&waiter);
        until = {static_cast<time_t>(deadline / 1000000000),
                 static_cast<long>(deadline % 1000000000)};
    }
    while (waiter.go.load(std::memory_order_acquire) == 0) {
        futex_wait(waiter.go, until.tv_sec ? &until : nullptr);
        if (waiter.go.load(std::memory_order_acquire)) break;
        const std::lock_guard lock(mutex);
        expire_locked();
        if (now_state != wire::State::closing) until = {};  // settled: only the client opens
    }
    // Again: a signal handler that was held meanwhile has left 0.
    waiter.slot->depth.store(1, std::memory_order_relaxed);
}

}  // namespace

void exempt_this_thread() {
    static thread_local Slot slot{{1}, {1}};
    own_slot = &slot;
}

Slot* first_pass() {
    if (!active()) return nullptr;
    static const bool key_made = pthread_key_create(&slot_key, leave_thread) == 0;
    if (!key_made) return nullptr;
    Slot* slot = slots.load(std::memory_order_acquire);
    for (; slot; slot = slot->next) {
        bool expected = false;
        if (!slot->owned.load(std::memory_order_relaxed) &&
            slot->owned.compare_exchange_strong(expected, true, std::memory_order_acquire))
            break;
    }
    if (!slot) {
        slot = new (std::nothrow) Slot;
        if (!slot) return nullptr;
        slot->next = slots.load(std::memory_order_relaxed);
        while (!slots.compare_exchange_weak(slot->next, slot, std::memory_order_release)) {
        }
    }
    own_slot = slot;
    pthread_setspecific(slot_key, slot);
    return slot;
}

void wait(Slot* slot) {
    const KeepErrno keep;
    Waiter waiter;
    waiter.slot = slot;
    // While it is held, the thread is not in the driver, whatever its wrapper began with.
    const uint32_t asking = slot->asking.exchange(1);
    slot->depth.store(0, std::memory_order_release);
    if (!(shut.load(std::memory_order_acquire) & kSealed)) driver.cuCtxGetCurrent(&waiter.context);
    slot->asking.store(0, std::memory_order_release);
    wait_until_admitted(waiter);
    slot->asking.store(asking, std::memory_order_relaxed);
}

void wait_until_unsealed(Slot* slot) {
    const KeepErrno keep;
    Waiter waiter;
    waiter.slot = slot;
    slot->asking.store(0, std::memory_order_release);
    {
        const std::lock_guard lock(mutex);
        if (!(shut.load(std::memory_order_relaxed) & kSealed)) {
            slot->asking.store(1, std::memory_order_relaxed);
            return;
        }
        askers.push_back(&waiter);
    }
    while (waiter.go.load(std::memory_order_acquire) == 0) futex_wait(waiter.go, nullptr);
    slot->asking.store(1, std::memory_order_relaxed);  // as above
}

bool closable() {
    const long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
    return commands > 0 && (commands & MEMBARRIER_CMD_PRIVATE_EXPEDITED);
}

bool close(uint32_t deadline_ms) {
    // Register the intent at every close, since a restored process has lost it.
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0) return false;
    {
        const std::lock_guard lock(mutex);
        if (now_state != wire::State::running) return true;
        now_state = wire::State::closing;
        deadline = monotonic_ns() + deadline_ms * 1000000ull;
        was_expired = false;
        admitted = 0;
        last_admitted = nullptr;
        shut.fetch_or(kShut, std::memory_order_release);
    }
    // After this, a thread that has not seen `shut` has made its depth visible here.
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0) return true;
    open();
    return false;
}

View view() {
    const std::lock_guard lock(mutex);
    expire_locked();
    View seen{now_state, 0, static_cast<uint32_t>(waiters.size()), admitted, false};
    for (Slot* slot = slots.load(std::memory_order_acquire); slot; slot = slot->next)
        if (slot->depth.load(std::memory_order_acquire)) ++seen.inside;
    seen.admitted_inside =
        last_admitted && last_admitted->depth.load(std::memory_order_acquire) != 0;
    return seen;
}

bool admit_oldest(bool (*wanted)(CUcontext)) {
    const std::lock_guard lock(mutex);
    for (auto at = waiters.begin(); at != waiters.end(); ++at) {
        Waiter* waiter = *at;
        if (wanted && !wanted(waiter->context)) continue;
        waiters.erase(at);
        ++admitted;
        now_state = wire::State::closing;
        last_admitted = waiter->slot;
        unseal_locked();
        release(waiter, &Slot::depth);
        return true;
    }
    return false;
}

bool settle() {
    const std::lock_guard lock(mutex);
    expire_locked();
    if (now_state == wire::State::closing) now_state = wire::State::closed;
    return now_state != wire::State::running;
}

int seal() {
    {
        const std::lock_guard lock(mutex);
        shut.fetch_or(kSealed, std::memory_order_release);
    }
    // As in close(): from here on, who has not seen it has made its count visible.
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0) return -1;
    int asking = 0;
    for (Slot* slot = slots.load(std::memory_order_acquire); slot; slot = slot->next)
        asking += slot->asking.load(std::memory_order_acquire) != 0;
    return asking;
}

bool take_expired() {
    const std::lock_guard lock(mutex);
    expire_locked();
    return std::exchange(was_expired, false);
}

void set_parked(bool parked) {
    const std::lock_guard lock(mutex);
    now_state = parked ? wire::State::parked : wire::State::closed;
    if (parked)
        shut.fetch_or(kParked, std::memory_order_release);
    else
        shut.fetch_and(~kParked, std::memory_order_release);
}

void open() {
    const std::lock_guard lock(mutex);
    was_expired = false;
    open_locked();
}

wire::State state() {
    const std::lock_guard lock(mutex);
    expire_locked();
    return now_state;
}

void abandon() {
    shut.store(0, std::memory_order_relaxed);
}

}  // namespace phos::gate
