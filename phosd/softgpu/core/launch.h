// Kernel launches.
#pragma once

#include "core/module.h"
#include "core/stream.h"

namespace phos::softgpu {

struct LaunchShape {
    ptx::Dim3 grid, block, cluster;
    unsigned dynamic_shared = 0;
    bool cooperative = false;
};

class KernelLaunch final : public Work {
  public:
    // Checks the launch and copies the arguments. Throws what the launch answers.
    KernelLaunch(std::shared_ptr<Function> function, const LaunchShape& shape, void** arguments,
                 void** extra);
    CUresult run(Context& context) const override;
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_KERNEL; }

    const std::shared_ptr<Function> function;
    const LaunchShape shape;

    // Pointers to the copied arguments, as kernelParams has them; they live as long as this.
    void** arguments() const { return pointers_.data(); }

  private:
    const ModulePtr module_;  // stays loaded while this can run
    std::vector<std::byte> parameters_;
    mutable std::vector<void*> pointers_;
};

// The function that a handle means: a CUfunction, or a CUkernel in the current context.
std::shared_ptr<Function> function_of(CUfunction handle);
// How many blocks of this size one multiprocessor holds.
int blocks_per_multiprocessor(const ptx::Kernel& kernel, unsigned threads, size_t dynamic_shared);

}  // namespace phos::softgpu
