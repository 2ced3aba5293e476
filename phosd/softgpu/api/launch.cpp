// Kernel launches.
#include "core/launch.h"

#include "api/api.h"
#include "api/works.h"
#include "core/submit.h"
#include "core/work.h"

using namespace phos::softgpu;

namespace {

void launch(CUfunction handle, const LaunchShape& shape, CUstream stream_handle, void** arguments,
            void** extra) {
    const StreamPtr stream = stream_of(stream_handle);
    const auto function = function_of(handle);
    require(function->module.context.get() == &stream->context, CUDA_ERROR_INVALID_HANDLE);
    submit(stream, std::make_shared<KernelLaunch>(function, shape, arguments, extra));
}

void launch_with_attributes(const CUlaunchConfig* config, CUstream stream, CUfunction function,
                            void** arguments, void** extra) {
    require(config != nullptr && (config->numAttrs == 0 || config->attrs != nullptr));
    LaunchShape shape;
    shape.grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    shape.block = {config->blockDimX, config->blockDimY, config->blockDimZ};
    shape.dynamic_shared = config->sharedMemBytes;
    EventPtr after;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const CUlaunchAttributeValue& value = config->attrs[i].value;
        switch (config->attrs[i].id) {
            case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
                shape.cooperative = value.cooperative != 0;
                break;
            case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                shape.cluster = {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
                break;
            case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
                after = runtime().events.get(value.programmaticEvent.event);
                break;
            case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
                after = runtime().events.get(value.launchCompletionEvent.event);
                break;
            // What may only make a launch faster is taken and has no effect.
            case CU_LAUNCH_ATTRIBUTE_IGNORE:
            case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
            case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
            case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
            case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            case CU_LAUNCH_ATTRIBUTE_PRIORITY:
            case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
            case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
            case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
            case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
                break;
            default:
                fail(CUDA_ERROR_NOT_SUPPORTED);
        }
    }
    launch(function, shape, stream, arguments, extra);
    if (after) record(after, stream_of(stream));
}

}  // namespace

namespace phos::softgpu {

std::shared_ptr<const KernelLaunch> launch_of(const CUDA_KERNEL_NODE_PARAMS_v2& what) {
    LaunchShape shape;
    shape.grid = {what.gridDimX, what.gridDimY, what.gridDimZ};
    shape.block = {what.blockDimX, what.blockDimY, what.blockDimZ};
    shape.dynamic_shared = what.sharedMemBytes;
    return std::make_shared<KernelLaunch>(
        function_of(what.func ? what.func : reinterpret_cast<CUfunction>(what.kern)), shape,
        what.kernelParams, what.extra);
}

}  // namespace phos::softgpu

STREAM_API(cuLaunchKernel,
           (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream stream,
            void** arguments, void** extra),
           (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments,
            extra)) {
    LaunchShape shape;
    shape.grid = {grid_x, grid_y, grid_z};
    shape.block = {block_x, block_y, block_z};
    shape.dynamic_shared = shared;
    launch(function, shape, stream, arguments, extra);
}

STREAM_API(cuLaunchCooperativeKernel,
           (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream stream,
            void** arguments),
           (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
            arguments)) {
    LaunchShape shape;
    shape.grid = {grid_x, grid_y, grid_z};
    shape.block = {block_x, block_y, block_z};
    shape.dynamic_shared = shared;
    shape.cooperative = true;
    launch(function, shape, stream, arguments, nullptr);
}

// The stream is in the configuration, so the two forms are written out.
DRIVER_API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                            void** extra) {
    return call([&] {
        require(config != nullptr);
        launch_with_attributes(config, config->hStream, function, arguments, extra);
    });
}
DRIVER_API cuLaunchKernelEx_ptsz(const CUlaunchConfig* config, CUfunction function,
                                 void** arguments, void** extra) {
    return call([&] {
        require(config != nullptr);
        launch_with_attributes(config, per_thread(config->hStream), function, arguments, extra);
    });
}
