// Build the tables of a session.
#include <algorithm>

#include "cow/session.h"
#include "memory/blocks.h"

namespace phos::cow {
namespace {

// Returns whether the block's device can read it there.
bool is_readable(const blocks::Mapping& mapping) {
    for (const CUmemAccessDesc& access : mapping.access)
        if (access.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
            access.location.id == mapping.block->device() &&
            (access.flags & CU_MEM_ACCESS_FLAGS_PROT_READ))
            return true;
    return false;
}

void renew_sources(TrackedBlock& tracked, Shadows* shadows) {
    std::vector<Source> sources;
    uint32_t mappings = 0;
    const auto block = blocks::by_id.find(tracked.id);
    if (block != blocks::by_id.end()) {
        for (const uint64_t address : block->second.mappings) {
            const blocks::Mapping& mapping = blocks::by_address.at(address);
            if (is_readable(mapping)) sources.push_back({address, mapping.offset, mapping.size});
        }
        mappings = static_cast<uint32_t>(block->second.mappings.size());
    }
    tracked.mappings.store(mappings, std::memory_order_release);
    if (!shadows) return;
    const std::lock_guard lock(shadows->mutex);
    tracked.sources = std::move(sources);
}

}  // namespace

size_t AddressTable::at_or_after(uint64_t address) const {
    // As std::upper_bound, but without branches, which could not be predicted.
    const uint64_t* first = ends.data();
    for (size_t left = ends.size(); left;) {
        const size_t half = (left + 1) / 2;
        first += first[half - 1] <= address ? half : 0;
        left -= half;
    }
    return static_cast<size_t>(first - ends.data());
}

TrackedBlock* Session::find(uint64_t block_id) {
    const auto found =
        std::lower_bound(tracked.begin(), tracked.end(), block_id,
                         [](const TrackedBlock& block, uint64_t id) { return block.id < id; });
    return found != tracked.end() && found->id == block_id ? &*found : nullptr;
}

void Session::renew_table() {
    auto* const next = new AddressTable;
    bool program_before = false;
    for (const auto& [address, mapping] : blocks::by_address) {
        const bool program = mapping.block->flags & wire::kProgramVmm;
        TrackedBlock* const block = find(mapping.block->id);
        if (!block && !program) continue;
        const auto index = static_cast<uint32_t>(next->entries.size());
        if (!program || !program_before || next->entries.back().end != address) {
            AddressTable::Extent& extent = next->extents.emplace_back();
            extent.first = index;
            extent.undone = index;
        }
        const auto extent = static_cast<uint32_t>(next->extents.size() - 1);
        next->extents.back().last = index + 1;
        next->entries.push_back({address, address + mapping.size, mapping.offset, block, extent});
        next->ends.push_back(address + mapping.size);
        program_before = program;
    }
    for (TrackedBlock& block : tracked) renew_sources(block, shadows_of(block));
    if (const AddressTable* const before = table.exchange(next)) retired.push_back(before);
    stale.store(false, std::memory_order_release);
}

void Session::drop_retired() {
    for (const AddressTable* const other : retired) delete other;
    retired.clear();
}

}  // namespace phos::cow
