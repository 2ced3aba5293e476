// A board as engine and movers see it: mapped, its layout checked once and kept here, because the
// program can write the header at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <vector>

#include "../../hook/protocol/chunk_map.h"

#define PHOS_EXPORT extern "C" __attribute__((visibility("default")))

namespace phos::board {

class View {
  public:
    // Both return null and set errno when they fail. `create` fills in header and tables; its
    // descriptor is the caller's. `open` takes a descriptor that stays the caller's.
    static View* create(const std::vector<BlockRow>& blocks, const SlabRow* slabs,
                        uint32_t slab_count, const KernelRow* kernels, uint32_t kernel_count,
                        int* descriptor);
    static View* open(int descriptor);
    ~View();
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    Header& header() { return *reinterpret_cast<Header*>(memory_); }
    uint32_t chunk_count() const { return chunk_count_; }
    uint32_t slab_count() const { return slab_count_; }
    std::atomic<uint32_t>& word(uint32_t chunk) { return words_[chunk]; }
    std::atomic<uint32_t>& touched(uint32_t chunk) { return touched_[chunk]; }
    const BlockRow& block(uint32_t row) const { return blocks_[row]; }
    uint32_t block_count() const { return block_count_; }
    SlabRow& slab(uint32_t row) { return slabs_[row]; }

    // Tells whoever waits for the movers that there is something to see.
    void progressed();
    void set_phase(Phase phase);
    // Until `posted` is no longer `seen`, at most so long. Whether it changed.
    bool wait_posted(uint32_t seen, double seconds);

    enum class Event : int { stopped, posted, ended };
    // Waits until the hook has posted, the process of `pidfd` has ended, or for stop_watching().
    Event watch(uint32_t seen, int pidfd);
    void stop_watching() { stopped_.store(true, std::memory_order_relaxed); }

    // Ids freed since this view last asked, at most kFreedRing. False: some were lost.
    bool freed(std::vector<uint64_t>& ids);
    // What `freed` has given is let go of.
    void freed_taken();

  private:
    View(std::byte* memory, size_t size) : memory_(memory), size_(size) {}
    bool adopt_layout();

    std::byte* memory_;
    size_t size_;
    uint32_t block_count_ = 0;
    uint32_t chunk_count_ = 0;
    uint32_t slab_count_ = 0;
    const BlockRow* blocks_ = nullptr;
    std::atomic<uint32_t>* words_ = nullptr;
    std::atomic<uint32_t>* touched_ = nullptr;
    SlabRow* slabs_ = nullptr;
    uint64_t freed_seen_ = 0;
    std::atomic<bool> stopped_{false};
};

inline uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace phos::board
