// Operations from the driver's descriptions of them, for streams and for graph nodes.
#pragma once

#include <cuda.h>

#include "core/launch.h"
#include "core/work.h"

namespace phos::softgpu {

std::shared_ptr<const Copy> copy_of(const CUDA_MEMCPY3D& what);
std::shared_ptr<const Fill> fill_of(const CUDA_MEMSET_NODE_PARAMS& what);
// CUDA_KERNEL_NODE_PARAMS_v2 and _v3 are alike.
std::shared_ptr<const KernelLaunch> launch_of(const CUDA_KERNEL_NODE_PARAMS_v2& what);

std::shared_ptr<const ValueOperations> value_operations(const CUstreamBatchMemOpParams* operations,
                                                        unsigned count, unsigned flags);

}  // namespace phos::softgpu
