// The hook's mapping of the board, checked once when it is mapped. Counts and offsets are copied,
// because the program can write to the board.
#pragma once

#include <string>

#include "protocol/chunk_map.h"

namespace phos::cow {

using Word = std::atomic<uint32_t>;

inline board::State state_of(uint32_t word) {
    return static_cast<board::State>(word & board::kStateMask);
}
inline uint32_t slot_of(uint32_t word) {
    return word >> board::kSlotShift;
}

struct MappedChunkMap {
    board::Header* header = nullptr;
    uint64_t size = 0;
    uint32_t block_count = 0;
    uint32_t chunk_count = 0;
    uint32_t slab_count = 0;
    uint32_t slot_count = 0;
    uint32_t kernel_count = 0;
    const board::BlockRow* blocks = nullptr;
    Word* words = nullptr;
    Word* touched = nullptr;
    board::SlabRow* slabs = nullptr;
    const board::KernelRow* kernels = nullptr;

    // Maps the board. Returns an empty text, or why the descriptor is no usable board; then nothing
    // is mapped.
    std::string map(int descriptor);
    void unmap();

    bool is_armed() const { return header->phase.load(std::memory_order_acquire) == board::armed; }
    // Ends the job, unless it is over already.
    void abort();
    // Wakes the movers, and threads that wait for them.
    void post();
    void wake_waiters();
    // Waits until `progressed` is no longer `seen`, for at most a tenth of a second.
    void wait_progress(uint32_t seen) const;
    // Asks the movers to save the chunk soon. False if no thread has to wait for it any more.
    bool ask_urgently(uint32_t chunk);
};

}  // namespace phos::cow
