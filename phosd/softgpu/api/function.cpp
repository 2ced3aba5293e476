// Kernels: what they are, what is set for them, and how many fit.
#include <algorithm>

#include "api/api.h"
#include "core/launch.h"

using namespace phos;
using namespace phos::softgpu;

namespace {

std::shared_ptr<LibraryKernel> kernel_of(CUkernel handle) {
    return runtime().kernels.get(handle);
}

int get(CUfunction_attribute attribute, const ptx::Kernel& kernel, const KernelSettings& settings) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            return static_cast<int>(kernel.max_threads);
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
            return static_cast<int>(kernel.static_shared_bytes);
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
            return 0;
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
            return static_cast<int>(kernel.local_bytes);
        case CU_FUNC_ATTRIBUTE_NUM_REGS:
            return static_cast<int>(kernel.registers);
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
            return 90;
        case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
            return 0;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: {
            const int set = settings.max_dynamic_shared;
            return set ? set
                       : std::max(0, (48 << 10) - static_cast<int>(kernel.static_shared_bytes));
        }
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            return settings.carveout;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
            return 0;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
            return settings
                .cluster[static_cast<size_t>(attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)];
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            return settings.large_clusters;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
            return settings.scheduling;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

void set(CUfunction_attribute attribute, int value, const ptx::Kernel& kernel,
         KernelSettings& settings) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            require(value >= 0 &&
                    static_cast<size_t>(value) + kernel.static_shared_bytes <= (227u << 10));
            settings.max_dynamic_shared = value;
            return;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            require(value >= -1 && value <= 100);
            settings.carveout = value;
            return;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
            require(value >= 0 && value <= 16);
            settings.cluster[static_cast<size_t>(attribute -
                                                 CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)] = value;
            return;
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            settings.large_clusters = value != 0;
            return;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
            settings.scheduling = value;
            return;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

void parameter_info(const ptx::Kernel& kernel, size_t index, size_t* offset, size_t* size) {
    require(offset != nullptr && index < kernel.parameters.size());
    *offset = kernel.parameters[index].offset;
    if (size) *size = kernel.parameters[index].size;
}

void best_block_size(int* grid, int* block, CUfunction handle, CUoccupancyB2DSize shared_for,
                     size_t shared, int limit) {
    require(grid != nullptr && block != nullptr && limit >= 0);
    const auto function = function_of(handle);
    const int largest = static_cast<int>(function->kernel.max_threads);
    if (limit == 0 || limit > largest) limit = largest;
    int best = 0, threads_at_best = 0;
    for (int threads = (limit + 31) / 32 * 32; threads > 0; threads -= 32) {
        const int candidate = std::min(threads, limit);
        const int blocks =
            blocks_per_multiprocessor(function->kernel, static_cast<unsigned>(candidate),
                                      shared_for ? shared_for(candidate) : shared);
        if (blocks * candidate <= best) continue;
        best = blocks * candidate;
        threads_at_best = candidate;
    }
    require(best > 0);
    *block = threads_at_best;
    *grid = best / threads_at_best * 2;
}

}  // namespace

API(cuFuncGetModule, (CUmodule * module, CUfunction function), (module, function)) {
    require(module != nullptr);
    *module = reinterpret_cast<CUmodule>(&function_of(function)->module);
}
API(cuFuncGetName, (const char** name, CUfunction function), (name, function)) {
    require(name != nullptr);
    *name = function_of(function)->kernel.name.c_str();
}
API(cuFuncGetAttribute, (int* value, CUfunction_attribute attribute, CUfunction function),
    (value, attribute, function)) {
    require(value != nullptr);
    const auto of = function_of(function);
    *value = get(attribute, of->kernel, *of->settings);
}
API(cuFuncSetAttribute, (CUfunction function, CUfunction_attribute attribute, int value),
    (function, attribute, value)) {
    const auto of = function_of(function);
    set(attribute, value, of->kernel, *of->settings);
}
API(cuFuncSetCacheConfig, (CUfunction function, CUfunc_cache config), (function, config)) {
    require(config <= CU_FUNC_CACHE_PREFER_EQUAL);  // a preference between caches there are none of
    function_of(function);
}
API(cuFuncSetSharedMemConfig, (CUfunction function, CUsharedconfig config), (function, config)) {
    require(config <= CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE);
    function_of(function);
}
API(cuFuncGetParamInfo, (CUfunction function, size_t index, size_t* offset, size_t* size),
    (function, index, offset, size)) {
    parameter_info(function_of(function)->kernel, index, offset, size);
}
API(cuFuncIsLoaded, (CUfunctionLoadingState * state, CUfunction function), (state, function)) {
    require(state != nullptr);
    function_of(function);
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
}
API(cuFuncLoad, (CUfunction function), (function)) {
    function_of(function);
}

API(cuKernelGetFunction, (CUfunction * function, CUkernel kernel), (function, kernel)) {
    require(function != nullptr);
    kernel_of(kernel);
    *function =
        reinterpret_cast<CUfunction>(function_of(reinterpret_cast<CUfunction>(kernel)).get());
}
API(cuKernelGetLibrary, (CUlibrary * library, CUkernel kernel), (library, kernel)) {
    require(library != nullptr);
    *library = reinterpret_cast<CUlibrary>(&kernel_of(kernel)->library);
}
API(cuKernelGetName, (const char** name, CUkernel kernel), (name, kernel)) {
    require(name != nullptr);
    *name = kernel_of(kernel)->outline.name.c_str();
}
API(cuKernelGetParamInfo, (CUkernel kernel, size_t index, size_t* offset, size_t* size),
    (kernel, index, offset, size)) {
    parameter_info(kernel_of(kernel)->outline, index, offset, size);
}
API(cuKernelGetAttribute,
    (int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device),
    (value, attribute, kernel, device)) {
    require(value != nullptr);
    const auto of = kernel_of(kernel);
    const auto ordinal = static_cast<size_t>(runtime().device(device).ordinal);
    *value = get(attribute, of->outline, *of->settings[ordinal]);
}
API(cuKernelSetAttribute,
    (CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device),
    (attribute, value, kernel, device)) {
    const auto of = kernel_of(kernel);
    const auto ordinal = static_cast<size_t>(runtime().device(device).ordinal);
    set(attribute, value, of->outline, *of->settings[ordinal]);
}
API(cuKernelSetCacheConfig, (CUkernel kernel, CUfunc_cache config, CUdevice device),
    (kernel, config, device)) {
    require(config <= CU_FUNC_CACHE_PREFER_EQUAL);
    kernel_of(kernel);
    runtime().device(device);
}

API(cuOccupancyMaxActiveBlocksPerMultiprocessor,
    (int* blocks, CUfunction function, int threads, size_t shared),
    (blocks, function, threads, shared)) {
    require(blocks != nullptr && threads > 0);
    *blocks = blocks_per_multiprocessor(function_of(function)->kernel,
                                        static_cast<unsigned>(threads), shared);
}
API(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
    (int* blocks, CUfunction function, int threads, size_t shared, unsigned flags),
    (blocks, function, threads, shared, flags)) {
    require(blocks != nullptr && threads > 0 && flags <= CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE);
    *blocks = blocks_per_multiprocessor(function_of(function)->kernel,
                                        static_cast<unsigned>(threads), shared);
}
API(cuOccupancyMaxPotentialBlockSize,
    (int* grid, int* block, CUfunction function, CUoccupancyB2DSize shared_for, size_t shared,
     int limit),
    (grid, block, function, shared_for, shared, limit)) {
    best_block_size(grid, block, function, shared_for, shared, limit);
}
API(cuOccupancyMaxPotentialBlockSizeWithFlags,
    (int* grid, int* block, CUfunction function, CUoccupancyB2DSize shared_for, size_t shared,
     int limit, unsigned flags),
    (grid, block, function, shared_for, shared, limit, flags)) {
    require(flags <= CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE);
    best_block_size(grid, block, function, shared_for, shared, limit);
}
API(cuOccupancyAvailableDynamicSMemPerBlock,
    (size_t* shared, CUfunction handle, int blocks, int threads),
    (shared, handle, blocks, threads)) {
    require(shared != nullptr && blocks > 0 && threads > 0);
    const auto function = function_of(handle);
    const size_t each = (228u << 10) / static_cast<size_t>(blocks);
    const size_t taken = function->kernel.static_shared_bytes + (1u << 10);
    *shared = std::min<size_t>(each > taken ? each - taken : 0, 227u << 10);
}
API(cuOccupancyMaxPotentialClusterSize,
    (int* size, CUfunction function, const CUlaunchConfig* config), (size, function, config)) {
    require(size != nullptr && config != nullptr);
    *size = function_of(function)->settings->large_clusters ? 16 : 8;
}
API(cuOccupancyMaxActiveClusters, (int* count, CUfunction handle, const CUlaunchConfig* config),
    (count, handle, config)) {
    require(count != nullptr && config != nullptr);
    const auto function = function_of(handle);
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            const auto& dim = config->attrs[i].value.clusterDim;
            cluster = dim.x * dim.y * dim.z;
        }
    require(cluster > 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);
    const int blocks = blocks_per_multiprocessor(
        function->kernel, config->blockDimX * config->blockDimY * config->blockDimZ,
        config->sharedMemBytes);
    *count = static_cast<int>(static_cast<unsigned>(blocks * 2) / cluster);
}
