// Lets driver calls in, and keeps them out while the process is locked for a checkpoint.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace phos::softgpu {

class Gate {
  public:
    // A call waits here while the gate is closed.
    void enter() {
        calls_.fetch_add(1);
        if (closed_.load()) wait_until_open();
    }
    void leave() {
        if (calls_.fetch_sub(1) == 1 && closed_.load()) changed();
    }

    // Work given to a stream counts until it is complete.
    void work_begins() { work_.fetch_add(1); }
    void work_ends() {
        if (work_.fetch_sub(1) == 1 && closed_.load()) changed();
    }

    // Closes to new calls and waits for those inside and for all work in flight. False, and open
    // again, when that takes longer than `limit` (zero: no limit).
    bool close(std::chrono::milliseconds limit);
    void open();

  private:
    void wait_until_open();
    void changed();

    std::atomic<uint64_t> calls_{0};
    std::atomic<uint64_t> work_{0};
    std::atomic<bool> closed_{false};
    std::mutex mutex_;
    std::condition_variable condition_;
};

}  // namespace phos::softgpu
