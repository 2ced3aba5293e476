// The tables of a session, and what the rest of the hook tells it when mappings change.
#include <algorithm>

#include "blocks.h"
#include "hook.h"
#include "session.h"

namespace phos::cow {
namespace {

constexpr long kPause = 20'000;  // nanoseconds

// Whether the device that holds the block can read it there.
bool is_readable(const blocks::Mapping& mapping) {
    for (const CUmemAccessDesc& access : mapping.access)
        if (access.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
            access.location.id == mapping.block->device() &&
            (access.flags & CU_MEM_ACCESS_FLAGS_PROT_READ))
            return true;
    return false;
}

void renew_sources(Kept& kept, Shadows* shadows) {
    std::vector<Source> sources;
    uint32_t mappings = 0;
    const auto block = blocks::by_id.find(kept.id);
    if (block != blocks::by_id.end()) {
        for (const uint64_t address : block->second.mappings) {
            const blocks::Mapping& mapping = blocks::by_address.at(address);
            if (is_readable(mapping)) sources.push_back({address, mapping.offset, mapping.size});
        }
        mappings = static_cast<uint32_t>(block->second.mappings.size());
    }
    kept.mappings.store(mappings, std::memory_order_release);
    if (!shadows) return;
    const std::lock_guard lock(shadows->mutex);
    kept.sources = std::move(sources);
}

}  // namespace

size_t Table::at_or_after(uint64_t address) const {
    // As std::upper_bound, but without a branch that nobody can predict.
    const uint64_t* first = ends.data();
    for (size_t left = ends.size(); left;) {
        const size_t half = (left + 1) / 2;
        first += first[half - 1] <= address ? half : 0;
        left -= half;
    }
    return static_cast<size_t>(first - ends.data());
}

Kept* Session::find(uint64_t block_id) {
    const auto found =
        std::lower_bound(kept.begin(), kept.end(), block_id,
                         [](const Kept& block, uint64_t id) { return block.id < id; });
    return found != kept.end() && found->id == block_id ? &*found : nullptr;
}

void Session::renew_table() {
    auto* const next = new Table;
    bool program_before = false;
    for (const auto& [address, mapping] : blocks::by_address) {
        const bool program = mapping.block->flags & wire::kProgramVmm;
        Kept* const block = find(mapping.block->id);
        if (!block && !program) continue;
        const auto index = static_cast<uint32_t>(next->entries.size());
        if (!program || !program_before || next->entries.back().end != address) {
            Table::Extent& extent = next->extents.emplace_back();
            extent.first = index;
            extent.undone = index;
        }
        const auto extent = static_cast<uint32_t>(next->extents.size() - 1);
        next->extents.back().last = index + 1;
        next->entries.push_back({address, address + mapping.size, mapping.offset, block, extent});
        next->ends.push_back(address + mapping.size);
        program_before = program;
    }
    for (Kept& block : kept) renew_sources(block, shadows_of(block));
    if (const Table* const before = table.exchange(next)) retired.push_back(before);
    stale.store(false, std::memory_order_release);
}

void Session::drop_retired() {
    for (const Table* const other : retired) delete other;
    retired.clear();
}

void unmapping(uint64_t address, uint64_t size) {
    const Reader session;
    if (!session) return;
    session->stale.store(true, std::memory_order_release);
    for (auto at = blocks::by_address.lower_bound(address);
         at != blocks::by_address.end() && at->first - address < size; ++at) {
        Kept* const kept = session->find(at->second.block->id);
        if (!kept) continue;
        kept->mappings.fetch_sub(1, std::memory_order_acq_rel);
        Shadows* const shadows = session->shadows_of(*kept);
        if (!shadows) continue;
        std::unique_lock lock(shadows->mutex);
        const uint64_t gone = at->first;
        kept->sources.erase(
            std::remove_if(kept->sources.begin(), kept->sources.end(),
                           [gone](const Source& source) { return source.address == gone; }),
            kept->sources.end());
        // Nothing is copied from there any more. What is being copied is soon done: it waits for
        // no work of the program's.
        for (const uint64_t batch = shadows->last_batch_of(*kept);
             !shadows->complete() && !shadows->has_passed(batch);) {
            lock.unlock();
            pause_for(kPause);
            lock.lock();
        }
        shadows->await_unrecorded();
    }
}

void remapped() {
    const Reader session;
    if (session) session->stale.store(true, std::memory_order_release);
}

void handed_out(uint64_t block_id) {
    const Reader session;
    if (session) session->newest = std::max(session->newest, block_id);
}

void freed(uint64_t block_id, int device, uint64_t size) {
    const Reader session;
    if (!session || block_id > session->newest) return;  // nobody else has it
    if (device >= 0 && device < static_cast<int>(board::kMaxDevices))
        session->freed_bytes[device].fetch_add(size, std::memory_order_relaxed);
    board::Header& header = *session->board.header;
    const uint64_t posted = header.freed_posted.load(std::memory_order_relaxed);
    header.freed[posted % board::kFreedRing].store(block_id, std::memory_order_relaxed);
    header.freed_posted.store(posted + 1, std::memory_order_release);
    session->board.post();
}

void context_ending(CUcontext context) {
    const Reader session;
    if (!session) return;
    for (const auto& shadows : session->shadows) {
        if (!shadows) continue;
        std::unique_lock lock(shadows->mutex);
        while (shadows->runs_in(context) && !shadows->complete()) {
            lock.unlock();
            pause_for(kPause);
            lock.lock();
        }
        shadows->end_stream(context);
    }
}

}  // namespace phos::cow
