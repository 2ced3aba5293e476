// Memory freed on a stream is kept, with an event that says when, and handed out again: to the same
// stream at once, to others when the event has passed. Memory that a capture allocates or frees
// belongs to the graph, and pools that can be exported belong to their importers as well; the
// driver keeps both.
#include "pool.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "contexts.h"
#include "gate.h"
#include "hook.h"
#include "own.h"
#include "relief.h"

namespace phos {
namespace {

// A stream as the order of work sees it: a per-thread stream is another one in each thread.
struct StreamKey {
    CUcontext context;
    CUstream stream;
    long thread;
    bool operator==(const StreamKey& other) const {
        return context == other.context && stream == other.stream && thread == other.thread;
    }
};

struct Freed {
    uint64_t address;
    heap::Allocation allocation;
    StreamKey stream;
    CUcontext context;
    CUevent event;        // null: of a context that has ended
    bool ending = false;  // the context may end at any time, and the event with it
};

struct PoolState {
    int device;
    uint64_t threshold = 0;  // bytes to keep, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    uint64_t used_high = 0;
    uint64_t reserved_high = 0;
};

// Below this, freed memory is kept whatever the threshold says: mapping again costs more.
constexpr uint64_t kKeep = 64 << 20;

// All guarded by blocks::mutex.
std::map<CUmemoryPool, PoolState> pools;  // those that are redirected
std::vector<Freed> freed;                 // oldest first

// The functions for a stream argument in its two meanings.
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
    StreamKey key(CUcontext context, CUstream stream) const {
        if (per_thread && !stream) stream = CU_STREAM_PER_THREAD;
        return {context, stream, stream == CU_STREAM_PER_THREAD ? syscall(SYS_gettid) : 0};
    }
    bool capturing(CUstream stream) const {
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        return contexts::captures() && is_capturing(stream, &status) == CUDA_SUCCESS &&
               status != CU_STREAM_CAPTURE_STATUS_NONE;
    }
};

PoolState* redirected(CUmemoryPool pool) {
    const auto found = pools.find(pool);
    if (found != pools.end()) return &found->second;
    int count = 0;
    if (!driver.cuDeviceGetDefaultMemPool || driver.cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return nullptr;
    for (int device = 0; device < count; ++device) {
        CUmemoryPool standard = nullptr;
        if (driver.cuDeviceGetDefaultMemPool(&standard, device) == CUDA_SUCCESS && standard == pool)
            return &(pools[pool] = PoolState{device});
    }
    return nullptr;
}

bool passed(const Freed& entry) {
    if (entry.ending) return false;
    if (!entry.event) return true;
    const Current current(entry.context);
    const Unforbidden unforbidden;
    return !current || driver.cuEventQuery(entry.event) != CUDA_ERROR_NOT_READY;
}

void forget_event(const Freed& entry) {
    if (entry.ending || !entry.event) return;
    const Current current(entry.context);
    if (current) driver.cuEventDestroy_v2(entry.event);
}

// Gives back what has been freed and is past its event: all of a heap's (of every heap's when null)
// as long as more than `keep` bytes remain.
bool give_back_passed(const heap::Heap* heap, uint64_t keep) {
    uint64_t held = 0;
    for (const Freed& entry : freed)
        if (!heap || entry.allocation.heap == heap) held += entry.allocation.reserved;
    bool any = false;
    for (auto entry = freed.begin(); entry != freed.end() && held > keep;) {
        if ((heap && entry->allocation.heap != heap) || !passed(*entry)) {
            ++entry;
            continue;
        }
        held -= entry->allocation.reserved;
        forget_event(*entry);
        heap::give_back(entry->address, entry->allocation);
        entry = freed.erase(entry);
        any = true;
    }
    return any;
}

// Memory freed before that `stream` may have now, 0 when there is none.
uint64_t reuse(const heap::Heap* heap, uint64_t size, const StreamKey& stream) {
    const uint64_t needed = heap::reserved_for(heap, size);
    for (auto entry = freed.begin(); entry != freed.end(); ++entry) {
        const uint64_t there = entry->allocation.reserved;
        if (entry->allocation.heap != heap || there < needed || there - needed > needed / 4)
            continue;
        if (!(entry->stream == stream) && !passed(*entry)) continue;
        const uint64_t address = entry->address;
        forget_event(*entry);
        heap::revive(address, entry->allocation, size);
        freed.erase(entry);
        return address;
    }
    return 0;
}

// True when the call was redirected, with its result.
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
    PoolState* state = redirected(pool);
    if (!state || !heap::supports(state->device)) return false;
    heap::Heap* heap = heap::of_pool(pool, state->device);
    uint64_t made = reuse(heap, size, calls.key(context, stream));
    *result = CUDA_SUCCESS;
    if (!made) {
        give_back_passed(heap, std::max(state->threshold, kKeep));
        *result =
            with_room(lock, state->device, size, [&] { return heap::allocate(heap, size, &made); });
    }
    if (*result != CUDA_SUCCESS) return true;
    state->used_high = std::max(state->used_high, heap->used);
    state->reserved_high = std::max(state->reserved_high, heap->reserved);
    *address = made;
    return true;
}

bool free_later(CUdeviceptr address, CUstream stream, const StreamCalls& calls, CUresult* result) {
    if (calls.capturing(stream)) return false;
    CUcontext context = nullptr;
    if (calls.context_of(stream, &context) != CUDA_SUCCESS) return false;
    const std::lock_guard lock(blocks::mutex);
    const auto* found = heap::find(address);
    if (!found) return false;
    if (found->first != address || found->second.freeing) {
        *result = CUDA_ERROR_INVALID_VALUE;
        return true;
    }
    const Current current(context);
    CUevent event = nullptr;
    *result = current ? driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
                      : CUDA_ERROR_INVALID_CONTEXT;
    if (*result != CUDA_SUCCESS) return true;
    *result = calls.record(event, stream);
    if (*result != CUDA_SUCCESS) {
        driver.cuEventDestroy_v2(event);
        return true;
    }
    freed.push_back(
        {address, heap::retire(address), calls.key(context, stream), context, event, false});
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
        result == CUDA_SUCCESS)  // the default pool of managed memory has no call
        note_if_managed(*address, "the program uses managed memory (a pool of it)");
    return result;
}

}  // namespace

bool pool::reclaim(std::unique_lock<std::mutex>& lock) {
    bool any = give_back_passed(nullptr, 0);
    if (!any && !freed.empty()) {
        lock.unlock();
        contexts::synchronize();
        lock.lock();
        any = give_back_passed(nullptr, 0);
    }
    return heap::trim_all() || any;
}

void pool::context_ending(CUcontext context) {
    const std::lock_guard lock(blocks::mutex);
    for (Freed& entry : freed)
        if (entry.context == context) entry.ending = true;
}

void pool::context_ended(CUcontext context, bool ended) {
    const std::lock_guard lock(blocks::mutex);
    for (Freed& entry : freed) {
        if (entry.context != context || !entry.ending) continue;
        entry.ending = false;
        if (ended) entry.event = nullptr;
    }
}

void pool::give_back_all(heap::Heap* heap) {
    for (auto entry = freed.begin(); entry != freed.end();) {
        if (entry->allocation.heap != heap) {
            ++entry;
            continue;
        }
        forget_event(*entry);
        heap::give_back(entry->address, entry->allocation);
        entry = freed.erase(entry);
    }
}

CUresult own::cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream stream) {
    return allocate_or_pass(address, size, nullptr, stream, false,
                            [](CUdeviceptr* at, size_t bytes, CUmemoryPool, CUstream on) {
                                return driver.cuMemAllocAsync(at, bytes, on);
                            });
}
CUresult own::cuMemAllocAsync_ptsz(CUdeviceptr* address, size_t size, CUstream stream) {
    return allocate_or_pass(address, size, nullptr, stream, true,
                            [](CUdeviceptr* at, size_t bytes, CUmemoryPool, CUstream on) {
                                return driver.cuMemAllocAsync_ptsz(at, bytes, on);
                            });
}
CUresult own::cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t size, CUmemoryPool pool,
                                      CUstream stream) {
    return allocate_or_pass(address, size, pool, stream, false, driver.cuMemAllocFromPoolAsync);
}
CUresult own::cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* address, size_t size, CUmemoryPool pool,
                                           CUstream stream) {
    return allocate_or_pass(address, size, pool, stream, true, driver.cuMemAllocFromPoolAsync_ptsz);
}
CUresult own::cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    const gate::Pass pass;
    CUresult result = CUDA_SUCCESS;
    return free_later(address, stream, {false}, &result) ? result
                                                         : driver.cuMemFreeAsync(address, stream);
}
CUresult own::cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
    const gate::Pass pass;
    CUresult result = CUDA_SUCCESS;
    return free_later(address, stream, {true}, &result)
               ? result
               : driver.cuMemFreeAsync_ptsz(address, stream);
}

CUresult own::cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* properties) {
    const CUresult result = driver.cuMemPoolCreate(pool, properties);
    if (result != CUDA_SUCCESS) return result;
    if (properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED)
        mark_unsupported("the program uses managed memory (a pool of it)");
    const bool plain = properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
                       properties->handleTypes == CU_MEM_HANDLE_TYPE_NONE &&
                       properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                       properties->maxSize == 0;
    const std::lock_guard lock(blocks::mutex);
    pools.erase(*pool);
    if (plain) pools[*pool] = PoolState{properties->location.id};
    return result;
}

CUresult own::cuMemPoolDestroy(CUmemoryPool pool) {
    const gate::Pass pass;
    const CUresult result = driver.cuMemPoolDestroy(pool);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    pools.erase(pool);
    heap::orphan_pool(pool);
    return result;
}

CUresult own::cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    const gate::Pass pass;
    const CUresult result = driver.cuMemPoolTrimTo(pool, keep);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    heap::Heap* heap = heap::find_pool(pool);
    if (!heap || heap->reserved <= keep) return result;
    const uint64_t used = heap->used;
    give_back_passed(heap, keep > used ? keep - used : 0);
    if (keep <= used) heap::trim(heap);
    return result;
}

CUresult own::cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
    const CUresult result = driver.cuMemPoolGetAttribute(pool, attribute, value);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    const heap::Heap* heap = heap::find_pool(pool);
    const auto state = pools.find(pool);
    if (!heap || state == pools.end()) return result;
    auto& bytes = *static_cast<cuuint64_t*>(value);  // what captures hold is the driver's to count
    switch (attribute) {
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
            bytes += heap->used;
            break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
            bytes += state->second.used_high;
            break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
            bytes += heap->reserved;
            break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
            bytes += state->second.reserved_high;
            break;
        default:
            break;
    }
    return result;
}

CUresult own::cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
    const CUresult result = driver.cuMemPoolSetAttribute(pool, attribute, value);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    PoolState* state = redirected(pool);
    if (!state) return result;
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        state->threshold = *static_cast<cuuint64_t*>(value);
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) state->used_high = 0;
    if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) state->reserved_high = 0;
    return result;
}

CUresult own::cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* access, size_t count) {
    const gate::Pass pass;
    const CUresult result = driver.cuMemPoolSetAccess(pool, access, count);
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    const PoolState* state = redirected(pool);
    return state ? heap::change_access(heap::of_pool(pool, state->device), access, count) : result;
}

}  // namespace phos
