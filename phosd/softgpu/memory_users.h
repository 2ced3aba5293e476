// The threads that touch device memory. A check of an address holds until its thread pauses: who
// takes memory away forbids it first, and then waits until every thread has paused once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#ifdef PHOS_THREAD_SANITIZER  // from its run-time library
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace phos::softgpu {

// What a device does to its memory is not checked for races: those are the faults of the streams
// of the program that it works for, and to follow every byte takes minutes.
class Unchecked {
  public:
    Unchecked(const Unchecked&) = delete;
    Unchecked& operator=(const Unchecked&) = delete;
#ifdef PHOS_THREAD_SANITIZER
    Unchecked() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unchecked() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
#else
    Unchecked() = default;
#endif
};

class MemoryUsers {
    struct Slot {
        std::atomic<uint64_t> turn{0};  // odd while its thread may touch memory
    };

  public:
    // One thread's use, for as long as it lives.
    class Use {
      public:
        explicit Use(const MemoryUsers& users) : users_(users), slot_(users.take()) { step(1); }
        ~Use() {
            step(1);
            users_.put(slot_);
        }
        Use(const Use&) = delete;
        Use& operator=(const Use&) = delete;
        // Nothing that was checked before holds any more.
        void pause() { step(2); }

      private:
        void step(uint64_t by) {
            slot_.turn.store(slot_.turn.load(std::memory_order_relaxed) + by,
                             std::memory_order_release);
            std::atomic_thread_fence(std::memory_order_seq_cst);  // with the one in wait()
        }
        const MemoryUsers& users_;
        Slot& slot_;
        const Unchecked unchecked_;
    };

    // Until every use under way has ended or paused. Not from within a use.
    void wait() const {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        std::vector<const Slot*> slots;
        {
            std::lock_guard lock(mutex_);
            for (const auto& slot : slots_) slots.push_back(slot.get());
        }
        for (const Slot* slot : slots) {
            const uint64_t turn = slot->turn.load(std::memory_order_acquire);
            while (turn % 2 && slot->turn.load(std::memory_order_acquire) == turn)
                std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

  private:
    Slot& take() const {
        std::lock_guard lock(mutex_);
        if (idle_.empty()) return *slots_.emplace_back(std::make_unique<Slot>());
        Slot& slot = *idle_.back();
        idle_.pop_back();
        return slot;
    }
    void put(Slot& slot) const {
        std::lock_guard lock(mutex_);
        idle_.push_back(&slot);
    }

    mutable std::mutex mutex_;
    mutable std::vector<std::unique_ptr<Slot>> slots_;
    mutable std::vector<Slot*> idle_;
};

}  // namespace phos::softgpu
