// Memory pools: of device memory, of host memory and of managed memory.
#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "core/device_file.h"
#include "core/handles.h"
#include "core/heap.h"
#include "core/stream.h"

namespace phos::softgpu {

// What memory a pool gives and where; each kind has a default pool.
struct PoolKind {
    CUmemAllocationType type = CU_MEM_ALLOCATION_TYPE_PINNED;
    CUmemLocationType location = CU_MEM_LOCATION_TYPE_DEVICE;
    int id = 0;  // ordinal or NUMA node

    // Throws the driver's answer to a location that there is not.
    static PoolKind of(const CUmemLocation& location, CUmemAllocationType type);

    bool managed() const { return type == CU_MEM_ALLOCATION_TYPE_MANAGED; }
    // The ordinal of the device whose memory it is; -1: host or managed memory.
    int device() const { return managed() || location != CU_MEM_LOCATION_TYPE_DEVICE ? -1 : id; }
    bool operator<(const PoolKind& other) const {
        return std::tie(type, location, id) < std::tie(other.type, other.location, other.id);
    }
};

struct Pool {
    explicit Pool(const PoolKind& kind_) : kind(kind_), heap(kind.device(), kind.managed()) {}

    // Throws CUDA_ERROR_NOT_SUPPORTED for what this kind of pool cannot give or take away.
    void set_access(const CUmemAccessDesc& description);
    CUmemAccess_flags access(const CUmemLocation& location) const;

    const PoolKind kind;
    Heap heap;
    std::atomic<bool> destroyed{false};  // ends with its last allocation
    int reuse_follow_events = 1, reuse_opportunistic = 1, reuse_internal = 1;

    // An exportable or imported pool has it, and the driver's checkpoint leaves it open (H100,
    // 580.159).
    DeviceFile device_file{false};
    bool exportable = false;
    bool imported = false;  // it gives nothing, and the driver cannot restore the process

  private:
    // Managed memory is there for all. The devices that were given access are kept: a bit for each
    // device, and one for the host.
    std::atomic<unsigned> advised_{0};
};
using PoolPtr = std::shared_ptr<Pool>;

// The pools of the process.
class Pools {
  public:
    CUmemoryPool create(const PoolKind& kind);
    void destroy(CUmemoryPool handle);
    PoolPtr get(CUmemoryPool handle) const {
        return handles_.get(handle, CUDA_ERROR_INVALID_VALUE);
    }

    PoolPtr standard(const PoolKind& kind);  // the default one
    PoolPtr current(const PoolKind& kind);
    void choose(const PoolKind& kind, const PoolPtr& pool);

    // The pool in which an address is allocated, or null.
    PoolPtr holding(uint64_t address, Allocation* allocation) const;
    // Gives back what pools of a device keep for later.
    void trim(int device) const;
    bool any_managed_memory() const;
    bool any_imported() const;
    // Forgets a destroyed pool once nothing is allocated from it.
    void sweep(const PoolPtr& pool);

  private:
    struct Slot {
        PoolPtr standard, current;
    };
    Slot& slot(const PoolKind& kind);
    PoolPtr add(const PoolKind& kind);

    Handles<CUmemoryPool, Pool> handles_;
    mutable std::mutex mutex_;
    std::map<PoolKind, Slot> slots_;
    std::vector<PoolPtr> all_;
};

// Frees when the stream comes to it.
class PoolFree final : public Work {
  public:
    PoolFree(Heap& heap, PoolPtr pool, uint64_t address)
        : heap_(heap), pool_(std::move(pool)), address_(address) {}
    CUresult run(Context&) const override;
    bool always() const override { return true; }

  private:
    Heap& heap_;
    const PoolPtr pool_;  // keeps a destroyed pool until its last allocation is freed
    const uint64_t address_;
};

}  // namespace phos::softgpu
