// The gate: it lets calls into the driver, or holds them. Passing an open gate costs two stores and
// a load on memory of the thread's own; whoever closes it pays for the order with membarrier(2).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/driver.h"
#include "protocol/wire.h"

namespace phos::gate {

// One a thread; reused after the thread's end, never freed, so that the closer may always look.
struct Slot {
    std::atomic<uint32_t> depth{0};  // calls into the driver under way, nested ones included
    std::atomic<bool> owned{true};
    Slot* next = nullptr;
};

// __thread, for a thread_local of another file would be reached through a function.
extern __thread Slot* own_slot __attribute__((tls_model("initial-exec")));
extern std::atomic<uint32_t> shut;  // not 0: the slow path decides
constexpr uint32_t kShut = 1;
constexpr uint32_t kParked = 2;

// For whoever must not take a lock.
inline bool parked() {
    return shut.load(std::memory_order_relaxed) == kParked;
}

Slot* first_pass();
void wait(Slot* slot);

// Held for the length of a call into the driver.
class Pass {
  public:
    Pass() : slot_(own_slot) {
        if (__builtin_expect(!slot_, 0)) slot_ = first_pass();
        if (__builtin_expect(!slot_, 0)) return;
        const uint32_t depth = slot_->depth.load(std::memory_order_relaxed);
        slot_->depth.store(depth + 1, std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (__builtin_expect(shut.load(std::memory_order_acquire) && depth == 0, 0)) wait(slot_);
    }
    ~Pass() {
        if (__builtin_expect(slot_ != nullptr, 1))
            slot_->depth.store(slot_->depth.load(std::memory_order_relaxed) - 1,
                               std::memory_order_release);
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

  private:
    Slot* slot_;
};

// As Pass, for what can be left out: does not wait, and is false at a closed gate.
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

// What the closer sees. `inside` counts threads in a gated call, `waiting` those held.
struct View {
    wire::State state;
    uint32_t inside;
    uint32_t waiting;
    uint64_t admitted;
    bool admitted_inside;  // the submission admitted last is still in its call
};

// Whether the system has what closing needs, as far as it says; close() may find out better.
bool closable();

// Closes an open gate; from `deadline_ms` on, whoever notices first opens it again, unless it has
// settled by then. False, and still open, when membarrier(2) fails and the order cannot be had.
bool close(uint32_t deadline_ms);
View view();
// Lets the oldest held call through whose thread has a current context that is `wanted` (any when
// null); closed -> closing again. False when none is held.
bool admit_oldest(bool (*wanted)(CUcontext));
bool settle();                 // closing -> closed; false when the deadline came first
bool take_expired();           // true once after the deadline has opened the gate
void set_parked(bool parked);  // closed <-> parked
void open();
wire::State state();

// In a child after fork: the gate is open for good and holds nobody.
void abandon();

}  // namespace phos::gate
