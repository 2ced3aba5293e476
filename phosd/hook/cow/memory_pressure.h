// Free memory for an allocation that finds none. What a job holds besides the program's memory
// (shadow slots, a snapshot, and freed blocks that are still being saved) must not make an
// allocation of the program fail: the job frees it step by step, and finally gives up.
#pragma once

#include <mutex>
#include <optional>

#include "base/driver.h"
#include "memory/stream_frees.h"

namespace phos {

class MemoryPressure {
  public:
    // For `size` bytes on a device. `lock`, of blocks::mutex, is released while waiting.
    MemoryPressure(std::unique_lock<std::mutex>& lock, int device, uint64_t size)
        : lock_(lock), device_(device), size_(size) {}
    ~MemoryPressure();
    MemoryPressure(const MemoryPressure&) = delete;
    MemoryPressure& operator=(const MemoryPressure&) = delete;

    // Takes the next step. True if the allocation should be tried again; false if no step is left
    // or none could help. All steps together take ten seconds at most.
    bool step();

  private:
    bool could_help() const;
    uint64_t held() const;
    std::optional<uint64_t> free_memory() const;
    void press(uint32_t level);
    bool wait_for_frees();

    std::unique_lock<std::mutex>& lock_;
    const int device_;
    const uint64_t size_;
    bool looked_ = false;  // could_help() was false once
    bool tried_again_ = false;
    uint32_t level_ = 0;  // of board::Pressure
    unsigned tries_ = 0;  // remaining after the last level
};

// Calls `make` until it succeeds, fails for a reason other than lack of memory, or nothing more can
// be freed.
template <class Make>
CUresult with_room(std::unique_lock<std::mutex>& lock, int device, uint64_t size, Make make) {
    CUresult result = make();
    while (result == CUDA_ERROR_OUT_OF_MEMORY && stream_frees::reclaim(lock)) result = make();
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
    for (MemoryPressure pressure(lock, device, size);
         result == CUDA_ERROR_OUT_OF_MEMORY && pressure.step();)
        result = make();
    return result;
}

}  // namespace phos
