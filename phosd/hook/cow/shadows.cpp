#include "cow/shadows.h"

#include <algorithm>

#include "base/faults.h"
#include "base/log.h"
#include "memory/contexts.h"

namespace phos::cow {

using board::kChunk;
using board::kNoChunk;

CUresult Shadows::add_slab(uint32_t row, uint32_t first_slot, uint32_t slots, int descriptor,
                           const char** call) {
    Slab slab{};
    slab.row = row;
    slab.first_slot = first_slot;
    slab.slots.resize(slots);
    CUmemAllocationProp properties{};
    *call = "cuMemImportFromShareableHandle";
    CUresult result = faults::step(faults::Point::arm, [&] {
        return driver.cuMemImportFromShareableHandle(
            &slab.handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    });
    if (result != CUDA_SUCCESS) return result;
    *call = "cuMemGetAllocationPropertiesFromHandle";
    result = driver.cuMemGetAllocationPropertiesFromHandle(&properties, slab.handle);
    if (result == CUDA_SUCCESS && (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                                   properties.location.id != device_))
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS) {
        *call = "cuMemAddressReserve";
        result = driver.cuMemAddressReserve(&slab.address, slab.bytes(), 0, 0, 0);
    }
    if (result == CUDA_SUCCESS) {
        *call = "cuMemMap";
        result = driver.cuMemMap(slab.address, slab.bytes(), 0, slab.handle, 0);
        if (result == CUDA_SUCCESS) {
            const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device_},
                                         CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
            *call = "cuMemSetAccess";
            result = driver.cuMemSetAccess(slab.address, slab.bytes(), &access, 1);
            if (result != CUDA_SUCCESS) driver.cuMemUnmap(slab.address, slab.bytes());
        }
        if (result != CUDA_SUCCESS) driver.cuMemAddressFree(slab.address, slab.bytes());
    }
    if (result == CUDA_SUCCESS)
        slabs_.push_back(std::move(slab));
    else
        driver.cuMemRelease(slab.handle);
    return result;
}

bool Shadows::ready() {
    if (failed_ || slabs_.empty()) return false;
    if (stream_) return true;
    CUcontext context = contexts::any_on(device_);
    if (!context) return false;
    const Current current(context);
    int least = 0;
    int greatest = 0;
    if (!current || driver.cuCtxGetStreamPriorityRange(&least, &greatest) != CUDA_SUCCESS)
        return false;
    // High priority, as the program waits for this stream.
    const CUresult result =
        driver.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, greatest);
    if (result != CUDA_SUCCESS) {
        log::note("no stream for shadows on device %d: %s", device_, error_name(result));
        stream_ = nullptr;
        return false;
    }
    context_ = context;
    return true;
}

void Shadows::cover(const TrackedBlock& block, uint32_t first, uint32_t last, Pending* pending) {
    for (uint32_t i = first; i < last;) {
        const uint32_t chunk = block.first_chunk + i;
        const uint32_t word = board_.words[chunk].load(std::memory_order_acquire);
        if (state_of(word) == board::pending) {
            if (const uint32_t count = shadow(block, i, last)) {
                pending->batch = recorded_ + 1;
                i += count;
                continue;
            }
            if (state_of(board_.words[chunk].load(std::memory_order_acquire)) != board::pending)
                continue;  // a mover took it first
        }
        if (state_of(word) == board::shadowing) {
            pending->batch = std::max(pending->batch, batch_of(slot_of(word)));
        } else if (state_of(word) == board::pending || state_of(word) == board::copying) {
            pending->blocked |= board_.ask_urgently(chunk);
        }
        ++i;
    }
}

// Shadows a run of pending chunks from `first` on with one copy. Returns their number; 0 if there
// is no slot, no readable mapping, or the first is not pending any more.
uint32_t Shadows::shadow(const TrackedBlock& block, uint32_t first, uint32_t last) {
    const uint64_t begin = first * kChunk;
    const Source* from = nullptr;
    uint64_t end = 0;
    for (const Source& source : block.sources) {
        end = source.offset + source.size;
        if (source.offset <= begin && std::min(begin + kChunk, block.size) <= end) {
            from = &source;
            break;
        }
    }
    if (!from || !ready()) return 0;
    const auto whole = static_cast<uint32_t>(end >= block.size ? last : end / kChunk);
    const Run run = free_run(std::min(last, whole) - first);
    if (!run.count) return 0;
    const uint32_t chunk = block.first_chunk + first;
    uint32_t count = 0;
    for (; count < run.count; ++count) {
        const uint32_t slot = run.slab->first_slot + run.first + count;
        uint32_t word = board_.words[chunk + count].load(std::memory_order_relaxed);
        bool claimed = false;
        while (!claimed && state_of(word) == board::pending)
            claimed = board_.words[chunk + count].compare_exchange_weak(
                word, slot << board::kSlotShift | (word & board::kUrgent) | board::shadowing,
                std::memory_order_acq_rel);
        if (!claimed) break;
    }
    if (!count) return 0;
    occupy(run, count, chunk);
    const Current current(context_);
    const CUresult result = faults::step(faults::Point::shadow, [&] {
        const uint64_t size = std::min(count * kChunk, block.size - begin);
        return driver.cuMemcpyDtoDAsync_v2(run.slab->address + run.first * kChunk,
                                           from->address + (begin - from->offset),
                                           faults::take_short() ? size / 2 : size, stream_);
    });
    if (result == CUDA_SUCCESS) return count;
    log::note("shadowing on device %d: %s", device_, error_name(result));
    failed_ = true;
    withdraw(count);
    return 0;
}

void Shadows::record(Pending* pending) {
    if (copying_.empty() || batch_of(copying_.back()) <= recorded_) return;  // nothing new
    const Current current(context_);
    CUevent event = nullptr;
    CUresult result = CUDA_SUCCESS;
    if (!events_.empty()) {
        event = events_.back();
        events_.pop_back();
    } else {
        result = driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    }
    if (result == CUDA_SUCCESS) {
        result = driver.cuEventRecord(event, stream_);
        if (result != CUDA_SUCCESS) driver.cuEventDestroy_v2(event);
    }
    if (result == CUDA_SUCCESS) {
        in_flight_.push_back({++recorded_, event});
        return;
    }
    // These copies cannot be waited for: a mover has to save the chunks.
    log::note("an event for shadows on device %d: %s", device_, error_name(result));
    failed_ = true;
    unrecorded_ = true;
    const auto fresh = std::find_if(copying_.rbegin(), copying_.rend(),
                                    [this](uint32_t slot) { return batch_of(slot) <= recorded_; });
    withdraw(static_cast<size_t>(fresh - copying_.rbegin()));
    pending->batch = std::min(pending->batch, recorded_);
    pending->blocked = true;
}

bool Shadows::complete() {
    if (!stream_) return true;
    const Current current(context_);
    while (!in_flight_.empty()) {
        const Batch batch = in_flight_.front();
        // After any other error the context is lost; the digests tell what was copied before.
        if (driver.cuEventQuery(batch.event) == CUDA_ERROR_NOT_READY) return false;
        in_flight_.pop_front();
        events_.push_back(batch.event);
        completed_ = batch.number;
        for (; !copying_.empty() && batch_of(copying_.front()) <= completed_; copying_.pop_front())
            finish(copying_.front(), copying_.front() << board::kSlotShift | board::shadowed);
    }
    return true;
}

CUevent Shadows::event_of(uint64_t batch) const {
    for (const Batch& other : in_flight_)
        if (other.number >= batch) return other.event;
    return nullptr;
}

uint64_t Shadows::last_batch_of(const TrackedBlock& block) {
    for (auto slot = copying_.rbegin(); slot != copying_.rend(); ++slot)
        if (slot_at(*slot)->chunk - block.first_chunk < block.chunks) return batch_of(*slot);
    return 0;
}

void Shadows::await_unrecorded() {
    if (!unrecorded_ || !stream_) return;
    const Current current(context_);
    const RelaxedCapture relaxed;
    const CUresult result = driver.cuStreamSynchronize(stream_);
    if (result == CUDA_SUCCESS)
        unrecorded_ = false;  // nothing is shadowed any more
    else
        log::note("waiting for shadows on device %d: %s", device_, error_name(result));
}

bool Shadows::release_free_slabs() {
    reclaim();
    if (unrecorded_) return false;
    bool any = false;
    for (auto slab = slabs_.begin(); slab != slabs_.end();) {
        if (slab->used) {
            ++slab;
            continue;
        }
        let_go(*slab);
        slab = slabs_.erase(slab);
        any = true;
    }
    return any;
}

uint64_t Shadows::bytes() const {
    uint64_t sum = 0;
    for (const Slab& slab : slabs_) sum += slab.bytes();
    return sum;
}

void Shadows::end_stream(CUcontext of) {
    if (!stream_ || (of && of != context_)) return;
    const Current current(context_);
    for (const CUevent event : events_) driver.cuEventDestroy_v2(event);
    events_.clear();
    driver.cuStreamDestroy_v2(stream_);
    stream_ = nullptr;
    context_ = nullptr;
}

void Shadows::release() {
    end_stream(nullptr);
    // A copy without an event may still write to them: then they are kept until the process ends.
    for (Slab& slab : slabs_)
        if (!unrecorded_) let_go(slab);
    slabs_.clear();
}

// Returns the longest run of free slots, up to `wanted`, at the first free one; empty if none.
Shadows::Run Shadows::free_run(uint32_t wanted) {
    for (;;) {
        for (Slab& slab : slabs_) {
            const auto size = static_cast<uint32_t>(slab.slots.size());
            if (slab.used == size) continue;
            uint32_t first = slab.cursor;
            while (slab.slots[first].chunk != kNoChunk) first = (first + 1) % size;
            uint32_t count = 1;
            while (count < wanted && first + count < size &&
                   slab.slots[first + count].chunk == kNoChunk)
                ++count;
            return {&slab, first, count};
        }
        const uint32_t progressed = board_.header->progressed.load(std::memory_order_acquire);
        if (progressed == reclaimed_at_) return {nullptr, 0, 0};
        reclaimed_at_ = progressed;
        reclaim();
    }
}

void Shadows::occupy(const Run& run, uint32_t count, uint32_t first_chunk) {
    for (uint32_t i = 0; i < count; ++i) {
        run.slab->slots[run.first + i] = {first_chunk + i, recorded_ + 1};
        copying_.push_back(run.slab->first_slot + run.first + i);
    }
    run.slab->used += count;
    run.slab->cursor = (run.first + count) % static_cast<uint32_t>(run.slab->slots.size());
}

// Takes back the newest `count` marked copies, before any thread could rely on them.
void Shadows::withdraw(size_t count) {
    for (; count; --count, copying_.pop_back()) {
        finish(copying_.back(), board::pending);
        Slab* slab = slab_of(copying_.back());
        slab->slots[copying_.back() - slab->first_slot] = {};
        --slab->used;
    }
}

// Frees the slots of saved chunks whose copies are complete: an earlier `saved` can only have been
// written by the program itself.
void Shadows::reclaim() {
    for (Slab& slab : slabs_)
        for (Slot& slot : slab.slots)
            if (slot.chunk != kNoChunk && slot.batch <= completed_ &&
                state_of(board_.words[slot.chunk].load(std::memory_order_acquire)) ==
                    board::saved) {
                slot.chunk = kNoChunk;
                --slab.used;
            }
}

// Replaces `shadowing` in this slot by `word`.
void Shadows::finish(uint32_t slot, uint32_t word) {
    const uint32_t chunk = slot_at(slot)->chunk;
    if (chunk == kNoChunk) return;
    uint32_t now = board_.words[chunk].load(std::memory_order_relaxed);
    while (state_of(now) == board::shadowing && slot_of(now) == slot)
        if (board_.words[chunk].compare_exchange_weak(now, word | (now & board::kUrgent),
                                                      std::memory_order_acq_rel)) {
            if (state_of(word) == board::shadowed)
                board_.header->shadowed_chunks.fetch_add(1, std::memory_order_relaxed);
            return;
        }
}

Shadows::Slab* Shadows::slab_of(uint32_t slot) {
    for (Slab& slab : slabs_)
        if (slot - slab.first_slot < slab.slots.size()) return &slab;
    return nullptr;
}

Shadows::Slot* Shadows::slot_at(uint32_t slot) {
    Slab* slab = slab_of(slot);
    return slab ? &slab->slots[slot - slab->first_slot] : nullptr;
}

// Returns 0 for a slot that does not exist: the program wrote that word.
uint64_t Shadows::batch_of(uint32_t slot) {
    const Slot* found = slot_at(slot);
    return found ? found->batch : 0;
}

void Shadows::let_go(Slab& slab) {
    driver.cuMemUnmap(slab.address, slab.bytes());
    driver.cuMemAddressFree(slab.address, slab.bytes());
    driver.cuMemRelease(slab.handle);
    board_.slabs[slab.row].released.store(1, std::memory_order_release);
}

}  // namespace phos::cow
