// The gate passes calls into the driver, or holds them. Closed, it holds those that submit work;
// sealed, all others as well: then no thread of the program is inside the driver. Passing an open
// gate costs two stores and a load of thread-local memory; closing it pays for the memory ordering
// with membarrier(2).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/driver.h"
#include "protocol/wire.h"

namespace phos::gate {

// A thread's state at the gate; reused after the thread's end, never freed, so that closing may
// always read it.
struct Slot {
    std::atomic<uint32_t> depth{0};   // submissions in progress, nested ones included
    std::atomic<uint32_t> asking{0};  // other calls in progress, nested ones included
    std::atomic<bool> owned{true};
    Slot* next = nullptr;
};

// __thread: a thread_local of another file would be accessed through a function.
extern __thread Slot* own_slot __attribute__((tls_model("initial-exec")));
extern std::atomic<uint32_t> shut;  // not 0: take the slow path
constexpr uint32_t kShut = 1;
constexpr uint32_t kSealed = 2;
constexpr uint32_t kParked = 4;

// For callers that must not take a lock.
inline bool parked() {
    return shut.load(std::memory_order_relaxed) & kParked;
}

// For the hook's own threads: never held, and not counted. The program's callbacks may call the
// driver on them.
void exempt_this_thread();

Slot* first_pass();
void wait(Slot* slot);
void wait_until_unsealed(Slot* slot);

// A call into the driver: counted in the thread's slot, and held first while `shut` has one of the
// bits. A nested call goes on, since the outer one counts.
template <std::atomic<uint32_t> Slot::* Count, uint32_t Bits, void (*Wait)(Slot*)>
class Counted {
  public:
    Counted() : slot_(own_slot) {
        if (__builtin_expect(!slot_, 0)) slot_ = first_pass();
        if (__builtin_expect(!slot_, 0)) return;
        const uint32_t before = (slot_->*Count).load(std::memory_order_relaxed);
        (slot_->*Count).store(before + 1, std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (__builtin_expect((shut.load(std::memory_order_acquire) & Bits) && before == 0, 0))
            Wait(slot_);
    }
    ~Counted() {
        if (__builtin_expect(slot_ != nullptr, 1))
            (slot_->*Count)
                .store((slot_->*Count).load(std::memory_order_relaxed) - 1,
                       std::memory_order_release);
    }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

  private:
    Slot* slot_;
};

// Held for the duration of a call that submits work.
using Pass = Counted<&Slot::depth, kShut | kSealed | kParked, wait>;

// Held for the duration of a call that submits nothing, but which the driver may answer from what a
// checkpoint takes away. It goes on while the gate is closed: the work that it asks for, or waits
// for, may be what the gate waits for.
using Ask = Counted<&Slot::asking, kSealed, wait_until_unsealed>;

// Like Pass, for optional work: does not wait, and is false at a closed gate.
class TryPass {
  public:
    TryPass() : slot_(own_slot ? own_slot : first_pass()) {
        if (!slot_) return;
        const uint32_t depth = slot_->depth.load(std::memory_order_relaxed);
        slot_->depth.store(depth + 1, std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (!shut.load(std::memory_order_acquire) || depth) return;
        slot_->depth.store(0, std::memory_order_release);
        slot_ = nullptr;
    }
    ~TryPass() {
        if (slot_)
            slot_->depth.store(slot_->depth.load(std::memory_order_relaxed) - 1,
                               std::memory_order_release);
    }
    TryPass(const TryPass&) = delete;
    TryPass& operator=(const TryPass&) = delete;
    explicit operator bool() const { return slot_ != nullptr; }

  private:
    Slot* slot_;
};

// The state seen by the thread that closes the gate. `inside` counts threads in a gated call,
// `waiting` held ones.
struct View {
    wire::State state;
    uint32_t inside;
    uint32_t waiting;
    uint64_t admitted;
    bool admitted_inside;  // the submission admitted last is still in its call
};

// Returns whether the system supports closing, as far as known; close() may find out otherwise.
bool closable();

// Closes an open gate. After `deadline_ms` the first thread to notice opens it again, unless it has
// settled. Returns false, with the gate open, if membarrier(2) fails.
bool close(uint32_t deadline_ms);
View view();
// Admits the oldest held call whose thread has a current context that is `wanted` (null: any);
// closed -> closing again, and not sealed. Returns false if none is held.
bool admit_oldest(bool (*wanted)(CUcontext));
bool settle();  // closing -> closed; false if the deadline came first
// Seals a closed gate until it opens. Returns how many threads are still in calls that submit
// nothing, or -1 if membarrier(2) fails.
int seal();
bool take_expired();           // true once after the deadline opened the gate
void set_parked(bool parked);  // closed <-> parked
void open();
wire::State state();

// In a child after fork: opens the gate for good.
void abandon();

}  // namespace phos::gate
