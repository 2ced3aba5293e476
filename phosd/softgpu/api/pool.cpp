// Memory pools and the stream-ordered allocator.
#include "core/pool.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "api/api.h"
#include "core/graph_memory.h"
#include "core/submit.h"

using namespace phos::softgpu;

namespace {

PoolPtr pool_of(CUmemoryPool handle) {
    return runtime().pools.get(handle);
}

CUmemoryPool handle_of(const PoolPtr& pool) {
    return reinterpret_cast<CUmemoryPool>(pool.get());
}

PoolKind kind_of(CUdevice device) {
    return PoolKind::of({CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ALLOCATION_TYPE_PINNED);
}

PoolKind kind_of(const CUmemLocation* location, CUmemAllocationType type) {
    require(location != nullptr);
    // A pool can be made for it, but there is none by default.
    require(location->type != CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, CUDA_ERROR_NOT_SUPPORTED);
    return PoolKind::of(*location, type);
}

void allocate(CUdeviceptr* address, size_t size, const PoolPtr& pool, CUstream handle) {
    require(address != nullptr && !pool->imported);
    const StreamPtr stream = stream_of(handle);
    if (captures(stream)) {
        require(pool->kind.device() >= 0, CUDA_ERROR_NOT_SUPPORTED);
        *address = allocate_in_graph(stream, pool->kind.device(), size, pool->heap.access());
        return;
    }
    *address = runtime().allocate(pool->heap, pool->kind.device(), size, &stream->context);
}

// What stands for the driver's device; without one a device that everybody has.
const char* device_path() {
    const std::string& path = runtime().config().device_file;
    return path.empty() ? "/dev/null" : path.c_str();
}

int* reuse_of(Pool& pool, CUmemPool_attribute attribute) {
    switch (attribute) {
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
            return &pool.reuse_follow_events;
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
            return &pool.reuse_opportunistic;
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
            return &pool.reuse_internal;
        default:
            return nullptr;
    }
}

}  // namespace

STREAM_API(cuMemAllocAsync, (CUdeviceptr * address, size_t size, CUstream stream),
           (address, size, stream)) {
    const int device = stream_of(stream)->context.device;
    allocate(address, size, runtime().pools.current(kind_of(device)), stream);
}
STREAM_API(cuMemAllocFromPoolAsync,
           (CUdeviceptr * address, size_t size, CUmemoryPool pool, CUstream stream),
           (address, size, pool, stream)) {
    allocate(address, size, pool_of(pool), stream);
}
STREAM_API(cuMemFreeAsync, (CUdeviceptr address, CUstream stream), (address, stream)) {
    const StreamPtr on = stream_of(stream);
    if (address == 0) return;
    const auto of_graph = GraphMemory::find(address);
    if (captures(on)) {
        require(of_graph != nullptr);
        of_graph->claim_free_node();
        submit(on, std::make_shared<GraphFree>(of_graph));
        return;
    }
    if (of_graph) {
        of_graph->give_back();
        submit(on, std::make_shared<GraphFree>(of_graph));
        return;
    }
    Allocation allocation;
    PoolPtr pool;
    Heap* heap = runtime().heap_of(address, &allocation, &pool);
    require(heap && allocation.address == address && heap->retire(address));
    submit(on, std::make_shared<PoolFree>(*heap, pool, address));
}

API(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice device), (pool, device)) {
    require(pool != nullptr);
    *pool = handle_of(runtime().pools.standard(kind_of(device)));
}
API(cuDeviceGetMemPool, (CUmemoryPool * pool, CUdevice device), (pool, device)) {
    require(pool != nullptr);
    *pool = handle_of(runtime().pools.current(kind_of(device)));
}
API(cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool), (device, pool)) {
    runtime().pools.choose(kind_of(device), pool_of(pool));
}
API(cuMemGetDefaultMemPool,
    (CUmemoryPool * pool, CUmemLocation* location, CUmemAllocationType type),
    (pool, location, type)) {
    require(pool != nullptr);
    *pool = handle_of(runtime().pools.standard(kind_of(location, type)));
}
API(cuMemGetMemPool, (CUmemoryPool * pool, CUmemLocation* location, CUmemAllocationType type),
    (pool, location, type)) {
    require(pool != nullptr);
    *pool = handle_of(runtime().pools.current(kind_of(location, type)));
}
API(cuMemSetMemPool, (CUmemLocation * location, CUmemAllocationType type, CUmemoryPool pool),
    (location, type, pool)) {
    runtime().pools.choose(kind_of(location, type), pool_of(pool));
}

API(cuMemPoolCreate, (CUmemoryPool * handle, const CUmemPoolProps* properties),
    (handle, properties)) {
    require(handle != nullptr && properties != nullptr);
    const CUmemAllocationHandleType types = properties->handleTypes;
    require(types == CU_MEM_HANDLE_TYPE_NONE || types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            CUDA_ERROR_NOT_SUPPORTED);
    const PoolKind kind = PoolKind::of(properties->location, properties->allocType);
    *handle = runtime().pools.create(kind);
    if (types == CU_MEM_HANDLE_TYPE_NONE) return;
    const PoolPtr pool = pool_of(*handle);
    pool->exportable = true;
    pool->device_file.take(runtime().config().device_file);
}
API(cuMemPoolDestroy, (CUmemoryPool handle), (handle)) {
    runtime().pools.destroy(handle);
}
API(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep)) {
    pool_of(pool)->heap.trim(keep);
}

API(cuMemPoolSetAttribute, (CUmemoryPool handle, CUmemPool_attribute attribute, void* value),
    (handle, attribute, value)) {
    require(value != nullptr);
    const PoolPtr pool = pool_of(handle);
    if (int* reuse = reuse_of(*pool, attribute)) {
        *reuse = *static_cast<int*>(value);
        return;
    }
    const uint64_t number = *static_cast<cuuint64_t*>(value);
    switch (attribute) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
            pool->heap.set_keep(number);
            return;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
            require(number == 0);
            pool->heap.reserved_high = pool->heap.reserved();
            return;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
            require(number == 0);
            pool->heap.used_high = pool->heap.used();
            return;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}
API(cuMemPoolGetAttribute, (CUmemoryPool handle, CUmemPool_attribute attribute, void* value),
    (handle, attribute, value)) {
    require(value != nullptr);
    const PoolPtr pool = pool_of(handle);
    if (const int* reuse = reuse_of(*pool, attribute)) {
        *static_cast<int*>(value) = *reuse;
        return;
    }
    auto& number = *static_cast<cuuint64_t*>(value);
    switch (attribute) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
            number = pool->heap.keep();
            return;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
            number = pool->heap.reserved();
            return;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
            number = pool->heap.reserved_high;
            return;
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
            number = pool->heap.used();
            return;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
            number = pool->heap.used_high;
            return;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

API(cuMemPoolSetAccess, (CUmemoryPool handle, const CUmemAccessDesc* descriptions, size_t count),
    (handle, descriptions, count)) {
    require(descriptions != nullptr || count == 0);
    const PoolPtr pool = pool_of(handle);
    for (size_t i = 0; i < count; ++i) pool->set_access(descriptions[i]);
}
API(cuMemPoolGetAccess, (CUmemAccess_flags * flags, CUmemoryPool handle, CUmemLocation* location),
    (flags, handle, location)) {
    require(flags != nullptr && location != nullptr);
    *flags = pool_of(handle)->access(*location);
}

// Sharing goes as far as a process without the hook must be refused or fail: the handle is the
// driver's device, as a real one, and no memory can be had by it.
API(cuMemPoolExportToShareableHandle,
    (void* shareable, CUmemoryPool handle, CUmemAllocationHandleType type,
     unsigned long long flags),
    (shareable, handle, type, flags)) {
    require(shareable != nullptr && flags == 0 && pool_of(handle)->exportable &&
            type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const int descriptor = open(device_path(), O_RDWR | O_CLOEXEC);
    require(descriptor >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *static_cast<int*>(shareable) = descriptor;
}
API(cuMemPoolImportFromShareableHandle,
    (CUmemoryPool * pool, void* shareable, CUmemAllocationHandleType type,
     unsigned long long flags),
    (pool, shareable, type, flags)) {
    require(pool != nullptr && flags == 0 && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    struct stat given{};
    struct stat device{};
    const auto descriptor = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    require(fstat(descriptor, &given) == 0 && stat(device_path(), &device) == 0 &&
            given.st_rdev == device.st_rdev);
    *pool = runtime().pools.create(kind_of(0));
    const PoolPtr made = pool_of(*pool);
    made->imported = true;
    made->device_file.take(runtime().config().device_file);
}
API(cuMemPoolExportPointer, (CUmemPoolPtrExportData * data, CUdeviceptr address), (data, address)) {
    require(data != nullptr && address != 0);
    fail(CUDA_ERROR_NOT_SUPPORTED);
}
API(cuMemPoolImportPointer,
    (CUdeviceptr * address, CUmemoryPool pool, CUmemPoolPtrExportData* data),
    (address, pool, data)) {
    require(address != nullptr && data != nullptr && pool_of(pool)->imported);
    fail(CUDA_ERROR_NOT_SUPPORTED);
}

// What graphs allocate (cuMemAllocAsync in a capture) is apart from the pools.
API(cuDeviceGraphMemTrim, (CUdevice device), (device)) {
    runtime().device(device).graph_heap.trim(0);
}
API(cuDeviceGetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attribute, void* value),
    (device, attribute, value)) {
    require(value != nullptr);
    const Heap& heap = runtime().device(device).graph_heap;
    auto& number = *static_cast<cuuint64_t*>(value);
    switch (attribute) {
        case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
            number = heap.used();
            return;
        case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
            number = heap.used_high;
            return;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT:
            number = heap.reserved();
            return;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
            number = heap.reserved_high;
            return;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}
API(cuDeviceSetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attribute, void* value),
    (device, attribute, value)) {
    require(value != nullptr && *static_cast<const cuuint64_t*>(value) == 0);
    Heap& heap = runtime().device(device).graph_heap;
    switch (attribute) {
        case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
            heap.used_high = heap.used();
            return;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
            heap.reserved_high = heap.reserved();
            return;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}
