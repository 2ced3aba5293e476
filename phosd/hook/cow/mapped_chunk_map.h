// The board as the hook sees it: checked once, when it is mapped. Counts and places are kept apart
// from it, for the program can write there.
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

    // Empty, or why the descriptor is no board that can be used; then nothing is mapped.
    std::string map(int descriptor);
    void unmap();

    bool is_armed() const { return header->phase.load(std::memory_order_acquire) == board::armed; }
    // The job is over, unless it is already.
    void abort();
    // Something for the movers to look at, and for those who wait for them.
    void post();
    void wake_waiters();
    // Until `progressed` is no longer `seen`, at most a tenth of a second.
    void wait_progress(uint32_t seen) const;
    // Asks for the chunk to be saved soon. False when nobody has to wait for it any more.
    bool ask_urgently(uint32_t chunk);
};

}  // namespace phos::cow
