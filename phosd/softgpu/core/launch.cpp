#include "core/launch.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/runtime.h"
#include "core/trace.h"

namespace phos::softgpu {
namespace {

constexpr size_t kSharedDefault = 48 << 10, kSharedOptIn = 227 << 10;
constexpr size_t kSharedPerMultiprocessor = 228 << 10, kSharedReserved = 1 << 10;
constexpr unsigned kMultiprocessors = 2, kThreadsPerMultiprocessor = 2048;
constexpr unsigned kBlocksPerMultiprocessor = 32, kRegistersPerMultiprocessor = 65536;

uint64_t volume(const ptx::Dim3& dim) {
    return uint64_t{dim.x} * dim.y * dim.z;
}

void check(const Function& function, const LaunchShape& shape) {
    const ptx::Dim3 &grid = shape.grid, &block = shape.block, &cluster = shape.cluster;
    require(volume(grid) > 0 && volume(block) > 0 && volume(cluster) > 0);
    require(grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535);
    require(block.x <= 1024 && block.y <= 1024 && block.z <= 64 && volume(block) <= 1024);
    require(volume(block) <= function.kernel.max_threads, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    const size_t allowed = std::max<size_t>(
        kSharedDefault - std::min(kSharedDefault, function.kernel.static_shared_bytes),
        static_cast<size_t>(function.settings->max_dynamic_shared.load()));
    require(shape.dynamic_shared <= allowed);
    require(volume(cluster) <= 16, CUDA_ERROR_INVALID_CLUSTER_SIZE);
    require(grid.x % cluster.x == 0 && grid.y % cluster.y == 0 && grid.z % cluster.z == 0,
            CUDA_ERROR_INVALID_CLUSTER_SIZE);
    if (shape.cooperative)
        require(volume(grid) <=
                    kMultiprocessors * static_cast<uint64_t>(blocks_per_multiprocessor(
                                           function.kernel, static_cast<unsigned>(volume(block)),
                                           shape.dynamic_shared)),
                CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
}

std::vector<std::byte> copy_arguments(const ptx::Kernel& kernel, void** arguments, void** extra) {
    std::vector<std::byte> bytes(kernel.parameter_bytes);
    require(!(arguments && extra));
    if (arguments) {
        for (size_t i = 0; i < kernel.parameters.size(); ++i) {
            require(arguments[i] != nullptr);
            const ptx::Parameter& parameter = kernel.parameters[i];
            std::memcpy(bytes.data() + parameter.offset, arguments[i], parameter.size);
        }
        return bytes;
    }
    const void* buffer = nullptr;
    const size_t* size = nullptr;
    for (size_t i = 0; extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[i + 1];
        else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = static_cast<const size_t*>(extra[i + 1]);
        else
            fail(CUDA_ERROR_INVALID_VALUE);
    }
    if (kernel.parameters.empty()) return bytes;
    const ptx::Parameter& last = kernel.parameters.back();
    require(buffer && size && *size >= last.offset + last.size);
    std::memcpy(bytes.data(), buffer, std::min(*size, bytes.size()));
    return bytes;
}

}  // namespace

KernelLaunch::KernelLaunch(std::shared_ptr<Function> function_, const LaunchShape& shape_,
                           void** arguments, void** extra)
    : function(std::move(function_)), shape(shape_), module_(function->module.shared_from_this()) {
    check(*function, shape);
    parameters_ = copy_arguments(function->kernel, arguments, extra);
    for (const ptx::Parameter& parameter : function->kernel.parameters)
        pointers_.push_back(parameters_.data() + parameter.offset);
}

CUresult KernelLaunch::run(Context&) const {
    ptx::Launch launch;
    launch.kernel = &function->kernel;
    launch.grid = shape.grid;
    launch.block = shape.block;
    launch.cluster = shape.cluster;
    launch.dynamic_shared_bytes = shape.dynamic_shared;
    launch.parameters = parameters_.data();
    launch.cooperative = shape.cooperative;
    launch.device = static_cast<unsigned>(module_->context->device);
    launch.memory = &runtime().space();
    TraceEntry trace(TraceEntry::Kind::kernel, function->kernel.name);
    launch.trace = trace.recorder();
#if PHOS_HAVE_PTX
    const ptx::Failure failure = ptx::run(launch);
#else
    const ptx::Failure failure{CUDA_ERROR_NOT_SUPPORTED, "no PTX machine"};
#endif
    if (failure) explain("the kernel " + function->kernel.name + " failed: " + failure.text);
    return failure.code;
}

std::shared_ptr<Function> function_of(CUfunction handle) {
    if (auto function = runtime().functions.find(handle)) return function;
    const auto kernel =
        runtime().kernels.get(reinterpret_cast<CUkernel>(handle), CUDA_ERROR_INVALID_HANDLE);
    return kernel->library.module(current())->function(kernel->outline.name);
}

int blocks_per_multiprocessor(const ptx::Kernel& kernel, unsigned threads, size_t dynamic_shared) {
    require(threads > 0);
    if (threads > kernel.max_threads) return 0;
    const unsigned warps = (threads + 31) / 32;
    const size_t shared = kernel.static_shared_bytes + dynamic_shared;
    if (shared > kSharedOptIn) return 0;
    size_t blocks = std::min(kBlocksPerMultiprocessor, kThreadsPerMultiprocessor / (warps * 32));
    blocks = std::min(blocks, kSharedPerMultiprocessor / (shared + kSharedReserved));
    if (kernel.registers)
        blocks =
            std::min<size_t>(blocks, kRegistersPerMultiprocessor / (kernel.registers * warps * 32));
    return static_cast<int>(blocks);
}

}  // namespace phos::softgpu
