#include "memory/stream_frees.h"

#include <atomic>
#include <set>
#include <vector>

#include "memory/contexts.h"

namespace phos::stream_frees {
namespace {

struct Freed {
    uint64_t address;
    heap::Allocation allocation;
    StreamKey stream;
    CUcontext context;
    CUevent event;        // null: its context has ended
    bool ending = false;  // the context may end at any time, and with it the event
    void (*close)(uint64_t address) = nullptr;  // for memory of another process
};

// Guarded by blocks::mutex.
std::vector<Freed> all_freed;         // oldest first
std::atomic<uint64_t> kept_bytes{0};  // of all of these; written under the lock

bool passed(const Freed& entry) {
    if (entry.ending) return false;
    if (!entry.event) return true;
    const Current current(entry.context);
    const RelaxedCapture relaxed;
    return !current || driver.cuEventQuery(entry.event) != CUDA_ERROR_NOT_READY;
}

void forget_event(const Freed& entry) {
    if (entry.ending || !entry.event) return;
    const Current current(entry.context);
    if (current) driver.cuEventDestroy_v2(entry.event);
}

void give_back(const Freed& entry) {
    if (entry.close)
        entry.close(entry.address);
    else
        heap::give_back(entry.address, entry.allocation);
}

std::vector<Freed>::iterator erase(std::vector<Freed>::iterator entry) {
    kept_bytes -= entry->allocation.reserved;
    return all_freed.erase(entry);
}

void give_back_all(heap::Heap* heap) {
    for (auto entry = all_freed.begin(); entry != all_freed.end();) {
        if (entry->allocation.heap != heap) {
            ++entry;
            continue;
        }
        forget_event(*entry);
        give_back(*entry);
        entry = erase(entry);
    }
}

}  // namespace

void keep(uint64_t address, const StreamKey& stream, CUevent event) {
    all_freed.push_back({address, heap::retire(address), stream, stream.context, event});
    kept_bytes += all_freed.back().allocation.reserved;
}

void keep_opened(uint64_t address, uint64_t size, heap::Heap* heap, void (*close)(uint64_t address),
                 const StreamKey& stream, CUevent event) {
    const heap::Allocation opened{size, size, heap, 0, false, false};
    all_freed.push_back({address, opened, stream, stream.context, event, false, close});
    kept_bytes += size;
}

bool give_back_passed(const heap::Heap* heap, uint64_t keep) {
    uint64_t held = 0;
    for (const Freed& entry : all_freed)
        if (!heap || entry.allocation.heap == heap) held += entry.allocation.reserved;
    bool any = false;
    for (auto entry = all_freed.begin(); entry != all_freed.end() && held > keep;) {
        if ((heap && entry->allocation.heap != heap) || !passed(*entry)) {
            ++entry;
            continue;
        }
        held -= entry->allocation.reserved;
        forget_event(*entry);
        give_back(*entry);
        entry = erase(entry);
        any = true;
    }
    return any;
}

void give_back_passed(uint64_t (*keep)(const heap::Heap& heap)) {
    std::set<const heap::Heap*> heaps;
    for (const Freed& entry : all_freed) heaps.insert(entry.allocation.heap);
    for (const heap::Heap* heap : heaps) give_back_passed(heap, keep(*heap));
}

uint64_t kept() {
    return kept_bytes.load(std::memory_order_relaxed);
}

uint64_t reuse(const heap::Heap* heap, uint64_t size, const StreamKey& stream) {
    const uint64_t needed = heap::reserved_for(heap, size);
    for (auto entry = all_freed.begin(); entry != all_freed.end(); ++entry) {
        const uint64_t there = entry->allocation.reserved;
        if (entry->allocation.heap != heap || there < needed || there - needed > needed / 4)
            continue;
        if (!(entry->stream == stream) && !passed(*entry)) continue;
        const uint64_t address = entry->address;
        forget_event(*entry);
        heap::revive(address, entry->allocation, size);
        erase(entry);
        return address;
    }
    return 0;
}

bool reclaim(std::unique_lock<std::mutex>& lock) {
    bool any = give_back_passed(nullptr, 0);
    if (!any && !all_freed.empty()) {
        lock.unlock();
        contexts::synchronize();
        lock.lock();
        any = give_back_passed(nullptr, 0);
    }
    return heap::trim_all() || any;
}

void context_ending(CUcontext context) {
    const std::lock_guard lock(blocks::mutex);
    for (Freed& entry : all_freed)
        if (entry.context == context) entry.ending = true;
}

void context_ended(CUcontext context, bool ended) {
    const std::lock_guard lock(blocks::mutex);
    for (Freed& entry : all_freed) {
        if (entry.context != context || !entry.ending) continue;
        entry.ending = false;
        if (ended) entry.event = nullptr;
    }
}

void orphan_pool(CUmemoryPool pool) {
    heap::Heap* const heap = heap::find_pool(pool);
    if (!heap) return;
    give_back_all(heap);
    heap::orphan_pool(pool);
}

void free_all_of(CUcontext context) {
    const std::lock_guard lock(blocks::mutex);
    heap::Heap* const heap = heap::find_context(context);
    if (!heap) return;
    heap::release_all(heap);
    give_back_all(heap);
    heap::drop_context(context);
}

}  // namespace phos::stream_frees
