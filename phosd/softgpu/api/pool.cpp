// Memory pools and the stream-ordered allocator.
#include "core/pool.h"

#include "api/api.h"
#include "core/submit.h"

using namespace phos::softgpu;

namespace {

PoolPtr pool_of(CUmemoryPool handle) {
    return runtime().pools.get(handle, CUDA_ERROR_INVALID_VALUE);
}

CUmemoryPool handle_of(const PoolPtr& pool) {
    return reinterpret_cast<CUmemoryPool>(pool.get());
}

PoolPtr current_pool(int ordinal) {
    Device& device = runtime().device(ordinal);
    std::lock_guard lock(device.mutex);
    return device.pool;
}

void allocate(CUdeviceptr* address, size_t size, const PoolPtr& pool, CUstream handle) {
    require(address != nullptr);
    const StreamPtr stream = stream_of(handle);
    require(!captures(stream), CUDA_ERROR_NOT_SUPPORTED);
    *address = runtime().allocate(pool->heap, pool->device, size, &stream->context);
}

int device_of(const CUmemLocation* location, CUmemAllocationType type) {
    require(location != nullptr);
    require(type == CU_MEM_ALLOCATION_TYPE_PINNED && location->type == CU_MEM_LOCATION_TYPE_DEVICE,
            CUDA_ERROR_NOT_SUPPORTED);
    return runtime().device(location->id).ordinal;
}

void choose(int ordinal, CUmemoryPool handle) {
    const PoolPtr pool = pool_of(handle);
    require(pool->device == ordinal);
    Device& device = runtime().device(ordinal);
    std::lock_guard lock(device.mutex);
    device.pool = pool;
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
    allocate(address, size, current_pool(stream_of(stream)->context.device), stream);
}
STREAM_API(cuMemAllocFromPoolAsync,
           (CUdeviceptr * address, size_t size, CUmemoryPool pool, CUstream stream),
           (address, size, pool, stream)) {
    allocate(address, size, pool_of(pool), stream);
}
STREAM_API(cuMemFreeAsync, (CUdeviceptr address, CUstream stream), (address, stream)) {
    const StreamPtr on = stream_of(stream);
    if (address == 0) return;
    require(!captures(on), CUDA_ERROR_NOT_SUPPORTED);
    Allocation allocation;
    PoolPtr pool;
    Heap* heap = runtime().heap_of(address, &allocation, &pool);
    require(heap && allocation.address == address && heap->retire(address));
    submit(on, std::make_shared<PoolFree>(*heap, pool, address));
}

API(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice device), (pool, device)) {
    require(pool != nullptr);
    *pool = handle_of(runtime().device(device).default_pool);
}
API(cuDeviceGetMemPool, (CUmemoryPool * pool, CUdevice device), (pool, device)) {
    require(pool != nullptr);
    *pool = handle_of(current_pool(device));
}
API(cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool), (device, pool)) {
    choose(device, pool);
}
API(cuMemGetDefaultMemPool,
    (CUmemoryPool * pool, CUmemLocation* location, CUmemAllocationType type),
    (pool, location, type)) {
    require(pool != nullptr);
    *pool = handle_of(runtime().device(device_of(location, type)).default_pool);
}
API(cuMemGetMemPool, (CUmemoryPool * pool, CUmemLocation* location, CUmemAllocationType type),
    (pool, location, type)) {
    require(pool != nullptr);
    *pool = handle_of(current_pool(device_of(location, type)));
}
API(cuMemSetMemPool, (CUmemLocation * location, CUmemAllocationType type, CUmemoryPool pool),
    (location, type, pool)) {
    choose(device_of(location, type), pool);
}

API(cuMemPoolCreate, (CUmemoryPool * handle, const CUmemPoolProps* properties),
    (handle, properties)) {
    require(handle != nullptr && properties != nullptr);
    require(properties->handleTypes == CU_MEM_HANDLE_TYPE_NONE, CUDA_ERROR_NOT_SUPPORTED);
    auto pool = std::make_shared<Pool>(device_of(&properties->location, properties->allocType),
                                       *properties);
    *handle = runtime().pools.add(pool);
    runtime().add_pool(pool);
}
API(cuMemPoolDestroy, (CUmemoryPool handle), (handle)) {
    const PoolPtr pool = pool_of(handle);
    Device& device = runtime().device(pool->device);
    std::lock_guard lock(device.mutex);
    require(pool != device.default_pool);
    if (device.pool == pool) device.pool = device.default_pool;
    runtime().pools.remove(handle);
    pool->destroyed = true;
    runtime().sweep(pool);
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
    for (size_t i = 0; i < count; ++i) {
        const int ordinal = device_of(&descriptions[i].location, CU_MEM_ALLOCATION_TYPE_PINNED);
        const CUmemAccess_flags flags = descriptions[i].flags;
        require(flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ||
                flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        require(ordinal != pool->device || flags != CU_MEM_ACCESS_FLAGS_PROT_NONE);
        const bool open = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        pool->heap.set_access(static_cast<unsigned>(ordinal), open, open);
    }
}
API(cuMemPoolGetAccess, (CUmemAccess_flags * flags, CUmemoryPool handle, CUmemLocation* location),
    (flags, handle, location)) {
    require(flags != nullptr);
    const PoolPtr pool = pool_of(handle);
    const int ordinal = device_of(location, CU_MEM_ALLOCATION_TYPE_PINNED);
    const bool open = ordinal == pool->device || pool->heap.access() >> ordinal & 1;
    *flags = open ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}
