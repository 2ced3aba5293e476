// cuMemAlloc and memory pools: allocations of any size from segments of device memory. Small ones
// share segments of 2 MiB; large ones have a segment of their own.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "core/space.h"

namespace phos::softgpu {

class Context;

struct Allocation {
    uint64_t address = 0;
    size_t size = 0;  // as asked for
    uint64_t id = 0;  // CU_POINTER_ATTRIBUTE_BUFFER_ID
    const Context* owner = nullptr;
};

class Heap {
  public:
    // `device` is an ordinal, -1 for memory in the host. What is managed, every device may touch.
    explicit Heap(int device, bool managed = false)
        : device_(device), access_(managed ? 0xff : 0) {}
    ~Heap();

    // Throws CUDA_ERROR_OUT_OF_MEMORY. `alignment` is a power of two up to kGranularity.
    uint64_t allocate(size_t size, const Context* owner, size_t alignment = kAlignment);
    bool free(uint64_t address);  // false: not the start of an allocation of this heap
    // Says that a free is on its way in a stream: no other may be. False as above.
    bool retire(uint64_t address);
    Allocation find(uint64_t address) const;  // size 0: none
    void free_all_of(const Context* owner);

    // Empty segments are given back beyond `keep` bytes (a pool's release threshold).
    void set_keep(uint64_t keep);
    uint64_t keep() const { return keep_; }
    void trim(uint64_t keep);

    // Lets a device touch every segment, present and future (peer access).
    void set_access(unsigned device, bool read, bool write);
    uint8_t access() const { return access_; }

    uint64_t reserved() const { return reserved_; }
    uint64_t used() const { return used_; }
    uint64_t reserved_high = 0, used_high = 0;  // CU_MEMPOOL_ATTR_*_MEM_HIGH

    static constexpr size_t kAlignment = 512;

  private:
    struct Segment {
        size_t size;
        size_t used = 0;
    };
    struct Block {
        size_t taken;  // bytes of the segment
        uint64_t segment;
        Allocation allocation;
        bool retired = false;
    };
    uint64_t take(uint64_t start, size_t hole, size_t size, size_t alignment);
    uint64_t add_segment(size_t size);
    void drop_segment(uint64_t address);
    void add_hole(uint64_t address, size_t size);
    void remove_hole(uint64_t address, size_t size);
    void free_block(std::map<uint64_t, Block>::iterator block);

    const int device_;
    mutable std::mutex mutex_;
    std::map<uint64_t, Segment> segments_;
    std::map<uint64_t, Block> blocks_;
    std::map<uint64_t, size_t> holes_;  // by address
    std::set<std::pair<size_t, uint64_t>> holes_by_size_;
    uint8_t access_;  // devices other than its own, as AddressSpace::pages
    uint64_t keep_ = 0, reserved_ = 0, used_ = 0;
};

}  // namespace phos::softgpu
