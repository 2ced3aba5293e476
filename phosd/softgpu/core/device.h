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

class Device {
  public:
    Device(int ordinal, unsigned gpu, const CUuuid& uuid);

    const int ordinal;
    Heap heap;        // cuMemAlloc, and what modules and the library itself need
    Heap graph_heap;  // what graphs allocate

    // Which GPU of the machine is behind it; a restore may choose another.
    unsigned gpu() const { return gpu_; }
    const CUuuid& uuid() const { return uuid_; }
    // On which it was at first. As with the driver, the PCI bus id goes on telling that one.
    const unsigned first_gpu;
    const CUuuid first_uuid;
    void move_to(unsigned gpu, const CUuuid& uuid);
    std::string name() const { return "gpu" + std::to_string(gpu_); }
    Registry& registry() { return *registry_; }

    std::mutex mutex;  // for what follows
    ContextPtr primary;
    unsigned primary_count = 0;
    unsigned primary_flags = 0;

  private:
    unsigned gpu_;
    CUuuid uuid_;
    std::unique_ptr<Registry> registry_;
};

}  // namespace phos::softgpu
