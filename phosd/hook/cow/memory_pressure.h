// Room for an allocation that finds none. What a job holds beside the program's own memory (shadow
// slots, a snapshot, and blocks that the program has freed and that are being saved) must cost the
// program no allocation: the job gives it back, step by step, and in the end gives up.
#pragma once

#include <mutex>
#include <optional>

#include "base/driver.h"
#include "memory/stream_frees.h"

namespace phos {

class MemoryPressure {
  public:
    // For `size` bytes on a device; the lock, of blocks::mutex, is let go of while waiting.
    MemoryPressure(std::unique_lock<std::mutex>& lock, int device, uint64_t size)
        : lock_(lock), device_(device), size_(size) {}
    ~MemoryPressure();
    MemoryPressure(const MemoryPressure&) = delete;
    MemoryPressure& operator=(const MemoryPressure&) = delete;

    // Takes the next step: true when the allocation should be tried again. False when there is
    // none, or none could help. All of them together take ten seconds at most.
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
    bool looked_ = false;  // for what could help, in vain
    bool tried_again_ = false;
    uint32_t level_ = 0;  // of board::Pressure
    unsigned tries_ = 0;  // left after the last level
};

// Calls `make` until it succeeds, or fails for another reason than that memory has run out, or
// nothing more can be given back.
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
