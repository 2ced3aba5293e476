// Redirect stream-ordered memory of device pools to memory of the hook. The driver keeps memory
// that a capture allocates or frees, which belongs to the graph.
#include "intercept/stream_pools.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/overrides.h"
#include "base/process.h"
#include "cow/memory_pressure.h"
#include "gate/gate.h"
#include "intercept/ipc_events.h"
#include "intercept/pool_sharing.h"
#include "intercept/unsupported.h"
#include "memory/backed_pools.h"
#include "memory/contexts.h"
#include "memory/stream_frees.h"

namespace phos {
namespace {

using backed_pools::Pool;

// Freed memory up to this size is kept, whatever the threshold says: mapping again costs more.
constexpr uint64_t kKeep = 64 << 20;

// The functions for the two meanings of stream 0.
struct StreamCalls {
    bool per_thread;
    CUresult is_capturing(CUstream stream, CUstreamCaptureStatus* status) const {
        return per_thread && driver.cuStreamIsCapturing_ptsz
                   ? driver.cuStreamIsCapturing_ptsz(stream, status)
                   : driver.cuStreamIsCapturing(stream, status);
    }
    CUresult context_of(CUstream stream, CUcontext* context) const {
        return per_thread && driver.cuStreamGetCtx_ptsz
                   ? driver.cuStreamGetCtx_ptsz(stream, context)
                   : driver.cuStreamGetCtx(stream, context);
    }
    CUresult record(CUevent event, CUstream stream) const {
        return per_thread && driver.cuEventRecord_ptsz ? driver.cuEventRecord_ptsz(event, stream)
                                                       : driver.cuEventRecord(event, stream);
    }
    stream_frees::StreamKey key(CUcontext context, CUstream stream) const {
        if (per_thread && !stream) stream = CU_STREAM_PER_THREAD;
        return {context, stream, stream == CU_STREAM_PER_THREAD ? syscall(SYS_gettid) : 0};
    }
    bool capturing(CUstream stream) const {
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        return contexts::captures() && is_capturing(stream, &status) == CUDA_SUCCESS &&
               status != CU_STREAM_CAPTURE_STATUS_NONE;
    }
};

uint64_t keep_of(const heap::Heap& heap) {
    const Pool* const state = backed_pools::find(heap.pool);
    return std::max(state ? state->threshold : 0, kKeep);
}

// Waits neither for the gate nor for the lock: other threads may be waiting for this caller.
void give_back_if_possible(uint64_t (*keep)(const heap::Heap& heap)) {
    const gate::TryPass pass;
    if (!pass) return;
    const std::unique_lock lock(blocks::mutex, std::try_to_lock);
    if (!lock) return;
    const RelaxedCapture relaxed;
    stream_frees::give_back_passed(keep);
}

// After the program has synchronised, frees the memory that pools hold beyond their threshold, as
// the driver does.
CUresult synchronized(CUresult result) {
    if (result == CUDA_SUCCESS && stream_frees::kept() > kKeep) give_back_if_possible(keep_of);
    return result;
}

// Returns true if the call was redirected, with its result.
bool allocate(CUdeviceptr* address, size_t size, CUmemoryPool pool, CUstream stream,
              const StreamCalls& calls, CUresult* result) {
    CUcontext context = nullptr;
    int device = 0;
    if (!address || !size || !contexts::current(&context, &device) || calls.capturing(stream) ||
        calls.context_of(stream, &context) != CUDA_SUCCESS)
        return false;
    if (!pool) {
        const Current current(context);
        CUdevice on = 0;
        if (!current || driver.cuCtxGetDevice(&on) != CUDA_SUCCESS || !driver.cuDeviceGetMemPool ||
            driver.cuDeviceGetMemPool(&pool, on) != CUDA_SUCCESS)
            return false;
    }
    std::unique_lock lock(blocks::mutex);
    Pool* state = backed_pools::find(pool);
    if (!state || !heap::supports(state->device)) return false;
    if (state->imported) {
        *result = CUDA_ERROR_INVALID_VALUE;
        return true;
    }
    heap::Heap* heap = heap::of_pool(pool, state->device);
    uint64_t made = stream_frees::reuse(heap, size, calls.key(context, stream));
    *result = CUDA_SUCCESS;
    if (!made) {
        stream_frees::give_back_passed(heap, std::max(state->threshold, kKeep));
        *result =
            with_room(lock, state->device, size, [&] { return heap::allocate(heap, size, &made); });
    }
    if (*result != CUDA_SUCCESS) return true;
    state->used_high = std::max(state->used_high, heap->used);
    state->reserved_high = std::max(state->reserved_high, heap->reserved);
    *address = made;
    return true;
}

// Records a new event on the stream. The driver may block, if the stream's queue is full, so no
// lock may be held.
CUresult record_on(CUstream stream, CUcontext context, const StreamCalls& calls, CUevent* event) {
    const Current current(context);
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = driver.cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS) return result;
    result = calls.record(*event, stream);
    if (result != CUDA_SUCCESS) driver.cuEventDestroy_v2(*event);
    return result;
}

// Until the event exists the memory is marked, as cuMemFree does, so that it is not reused.
bool free_later(CUdeviceptr address, CUstream stream, const StreamCalls& calls, CUresult* result) {
    if (calls.capturing(stream)) return false;
    CUcontext context = nullptr;
    if (calls.context_of(stream, &context) != CUDA_SUCCESS) return false;
    CUevent event = nullptr;
    if (pool_sharing::is_import(address)) {
        *result = record_on(stream, context, calls, &event);
        if (*result == CUDA_SUCCESS)
            pool_sharing::free_after(address, calls.key(context, stream), event);
        return true;
    }
    {
        const std::lock_guard lock(blocks::mutex);
        auto* found = heap::find(address);
        if (!found) return false;
        if (found->first != address || found->second.freeing) {
            *result = CUDA_ERROR_INVALID_VALUE;
            return true;
        }
        found->second.freeing = true;
    }
    *result = record_on(stream, context, calls, &event);
    const std::lock_guard lock(blocks::mutex);
    auto* found = heap::find(address);
    if (!found || found->first != address) return true;  // it was freed with its context meanwhile
    found->second.freeing = false;
    if (*result == CUDA_SUCCESS) stream_frees::keep(address, calls.key(context, stream), event);
    return true;
}

CUresult allocate_or_pass(CUdeviceptr* address, size_t size, CUmemoryPool pool, CUstream stream,
                          bool per_thread,
                          CUresult (*pass_on)(CUdeviceptr*, size_t, CUmemoryPool, CUstream)) {
    const gate::Pass pass;
    CUresult result = CUDA_SUCCESS;
    if (allocate(address, size, pool, stream, {per_thread}, &result)) return result;
    result = pass_on(address, size, pool, stream);
    if (pool && address &&
        result == CUDA_SUCCESS)  // there is no call for the default pool of managed memory
        note_if_managed(*address, "the program uses managed memory (a pool of it)");
    return result;
}

bool is_backed(const CUmemPoolProps& properties) {
    if (properties.allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties.maxSize != 0)
        return false;
    if (properties.handleTypes == CU_MEM_HANDLE_TYPE_NONE) return true;
    const std::lock_guard lock(blocks::mutex);
    return properties.handleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
           heap::supports(properties.location.id);
}

}  // namespace

CUresult overrides::cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream stream) {
    return allocate_or_pass(address, size, nullptr, stream, false,
                            [](CUdeviceptr* at, size_t bytes, CUmemoryPool, CUstream on) {
                                return driver.cuMemAllocAsync(at, bytes, on);
                            });
}
CUresult overrides::cuMemAllocAsync_ptsz(CUdeviceptr* address, size_t size, CUstream stream) {
    return allocate_or_pass(address, size, nullptr, stream, true,
                            [](CUdeviceptr* at, size_t bytes, CUmemoryPool, CUstream on) {
                                return driver.cuMemAllocAsync_ptsz(at, bytes, on);
                            });
}
CUresult overrides::cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t size, CUmemoryPool pool,
                                            CUstream stream) {
    return allocate_or_pass(address, size, pool, stream, false, driver.cuMemAllocFromPoolAsync);
}
CUresult overrides::cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* address, size_t size,
                                                 CUmemoryPool pool, CUstream stream) {
    return allocate_or_pass(address, size, pool, stream, true, driver.cuMemAllocFromPoolAsync_ptsz);
}
CUresult overrides::cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    const gate::Pass pass;
    CUresult result = CUDA_SUCCESS;
    return free_later(address, stream, {false}, &result) ? result
                                                         : driver.cuMemFreeAsync(address, stream);
}
CUresult overrides::cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
    const gate::Pass pass;
    CUresult result = CUDA_SUCCESS;
    return free_later(address, stream, {true}, &result)
               ? result
               : driver.cuMemFreeAsync_ptsz(address, stream);
}

// Not held at the gate: a closing gate may wait for what these wait for.
CUresult overrides::cuCtxSynchronize() {
    return synchronized(driver.cuCtxSynchronize());
}
CUresult overrides::cuCtxSynchronize_v2(CUcontext context) {
    return synchronized(driver.cuCtxSynchronize_v2(context));
}
CUresult overrides::cuStreamSynchronize(CUstream stream) {
    return synchronized(driver.cuStreamSynchronize(stream));
}
CUresult overrides::cuStreamSynchronize_ptsz(CUstream stream) {
    return synchronized(driver.cuStreamSynchronize_ptsz(stream));
}
CUresult overrides::cuEventSynchronize(CUevent event) {
    return synchronized(ipc_events::synchronize(event));
}

CUresult overrides::cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* properties) {
    const gate::Pass pass;
    if (!pool || !properties) return driver.cuMemPoolCreate(pool, properties);
    CUmemPoolProps made = *properties;
    const bool backed = is_backed(*properties);
    if (backed) made.handleTypes = CU_MEM_HANDLE_TYPE_NONE;  // the driver's would not be saved
    const CUresult result = driver.cuMemPoolCreate(pool, &made);
    if (result != CUDA_SUCCESS) return result;
    if (properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED)
        mark_unsupported(Reason::managed_memory, "the program uses managed memory (a pool of it)");
    if (made.handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        mark_unsupported(Reason::shared_pool,
                         "the program has a memory pool that can be exported (cuMemPoolCreate) and "
                         "is of host memory, has a size limit, or is exported otherwise than by a "
                         "file descriptor");
    Pool state;
    state.device = properties->location.id;
    state.exportable = properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE;
    if (backed)
        backed_pools::add(*pool, state);
    else
        backed_pools::forget(*pool);
    return result;
}

CUresult overrides::cuMemPoolDestroy(CUmemoryPool pool) {
    const gate::Pass pass;
    const CUresult result = driver.cuMemPoolDestroy(pool);
    if (result != CUDA_SUCCESS) return result;
    backed_pools::forget(pool);
    const std::lock_guard lock(blocks::mutex);
    stream_frees::orphan_pool(pool);
    return result;
}

CUresult overrides::cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    const gate::Pass pass;
    const CUresult result = driver.cuMemPoolTrimTo(pool, keep);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    heap::Heap* heap = heap::find_pool(pool);
    if (!heap || heap->reserved <= keep) return result;
    const uint64_t used = heap->used;
    stream_frees::give_back_passed(heap, keep > used ? keep - used : 0);
    if (keep <= used) heap::trim(heap);
    return result;
}

CUresult overrides::cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                          void* value) {
    const CUresult result = driver.cuMemPoolGetAttribute(pool, attribute, value);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    const heap::Heap* heap = heap::find_pool(pool);
    const Pool* const state = heap ? backed_pools::find(pool) : nullptr;
    if (!state) return result;
    auto& bytes = *static_cast<cuuint64_t*>(value);  // the driver counts what captures hold
    switch (attribute) {
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
            bytes += heap->used;
            break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
            bytes += state->used_high;
            break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
            bytes += heap->reserved;
            break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
            bytes += state->reserved_high;
            break;
        default:
            break;
    }
    return result;
}

CUresult overrides::cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                          void* value) {
    const CUresult result = driver.cuMemPoolSetAttribute(pool, attribute, value);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    Pool* state = backed_pools::find(pool);
    if (!state) return result;
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        state->threshold = *static_cast<cuuint64_t*>(value);
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) state->used_high = 0;
    if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) state->reserved_high = 0;
    return result;
}

CUresult overrides::cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* access,
                                       size_t count) {
    const gate::Pass pass;
    const CUresult result = driver.cuMemPoolSetAccess(pool, access, count);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    Pool* state = backed_pools::find(pool);
    if (state && state->imported) return pool_sharing::change_access(pool, access, count);
    return state ? heap::change_access(heap::of_pool(pool, state->device), access, count) : result;
}

void stream_pools::give_back_all() {
    if (stream_frees::kept() && !gate::shut.load())
        give_back_if_possible([](const heap::Heap&) -> uint64_t { return 0; });
}

}  // namespace phos
