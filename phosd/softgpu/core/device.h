// One device as the process sees it.
#pragma once

#include <cuda.h>

#include <memory>
#include <mutex>
#include <string>

#include "core/context.h"
#include "core/heap.h"
#include "core/identity.h"
#include "core/registry.h"

namespace phos::softgpu {

struct Pool {
    Pool(int device_, const CUmemPoolProps& properties_)
        : device(device_), properties(properties_), heap(device_) {}
    const int device;
    const CUmemPoolProps properties;
    Heap heap;
    std::atomic<bool> destroyed{false};  // ends with its last allocation
    int reuse_follow_events = 1, reuse_opportunistic = 1, reuse_internal = 1;
};
using PoolPtr = std::shared_ptr<Pool>;

class Device {
  public:
    Device(int ordinal, unsigned gpu);

    const int ordinal;
    Heap heap;  // cuMemAlloc, and what modules and the library itself need

    // Which GPU of the machine is behind it; a restore may choose another.
    unsigned gpu() const { return gpu_; }
    void move_to(unsigned gpu);
    std::string name() const { return "gpu" + std::to_string(gpu_); }
    Registry& registry() { return *registry_; }

    std::mutex mutex;  // for what follows
    PoolPtr default_pool, pool;
    ContextPtr primary;
    unsigned primary_count = 0;
    unsigned primary_flags = 0;

  private:
    unsigned gpu_;
    std::unique_ptr<Registry> registry_;
};

}  // namespace phos::softgpu
