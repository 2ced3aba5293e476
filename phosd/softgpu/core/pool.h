// The stream-ordered allocator.
#pragma once

#include "core/device.h"
#include "core/runtime.h"
#include "core/stream.h"

namespace phos::softgpu {

// Frees when the stream comes to it.
class PoolFree final : public Work {
  public:
    PoolFree(Heap& heap, PoolPtr pool, uint64_t address)
        : heap_(heap), pool_(std::move(pool)), address_(address) {}
    CUresult run(Context&) const override {
        heap_.free(address_);
        runtime().sweep(pool_);
        return CUDA_SUCCESS;
    }
    bool always() const override { return true; }

  private:
    Heap& heap_;
    const PoolPtr pool_;  // keeps a destroyed pool until its last allocation is freed
    const uint64_t address_;
};

}  // namespace phos::softgpu
