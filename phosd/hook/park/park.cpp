#include "park/park.h"

#include <unistd.h>

#include <cstdio>

#include "base/descriptors.h"
#include "base/faults.h"
#include "base/log.h"
#include "memory/blocks.h"
#include "memory/contexts.h"
#include "memory/event_words.h"
#include "memory/events.h"

namespace phos::park {
namespace {

using blocks::Block;
using blocks::Mapping;
using Lock = std::lock_guard<std::mutex>;
using faults::Point;

// Descriptors reserved for memory that the program might export, beyond what it has exported.
constexpr unsigned kSpareDescriptors = 256;

// Runs `step` for every mapping of the hook's blocks; on failure runs `undo` for those done.
template <class Step, class Undo>
Outcome for_all_mappings(const char* call, Step step, Undo undo) {
    for (auto at = blocks::by_address.begin(); at != blocks::by_address.end(); ++at) {
        if (at->second.block->foreign) continue;
        const CUresult result = step(at->first, at->second);
        if (result == CUDA_SUCCESS) continue;
        const Outcome failed = failure(result, call, at->second.block->id);
        while (at != blocks::by_address.begin())
            if (--at; !at->second.block->foreign) undo(at->first, at->second);
        return failed;
    }
    return {};
}

Outcome no_block(uint64_t id, uint64_t count) {
    return {wire::Status::bad_message, count, "there is no block " + std::to_string(id)};
}

// Null for a block that the hook has not got. Needs the lock.
Block* own_block(uint64_t id) {
    const auto found = blocks::by_id.find(id);
    return found == blocks::by_id.end() || found->second.foreign ? nullptr : &found->second;
}

CUresult unmap_one(uint64_t address, const Mapping& mapping) {
    return driver.cuMemUnmap(address, mapping.size);
}

Outcome not_imported(CUresult result, uint64_t block) {
    Outcome outcome = failure(result, "importing", block);
    if (result == CUDA_ERROR_INVALID_DEVICE || result == CUDA_ERROR_NOT_INITIALIZED)
        outcome.status = wire::Status::not_importable;
    return outcome;
}

// Releases the memory of a parked block that a client has had made and never filled.
void release_made(Block& block) {
    if (block.handle) driver.cuMemRelease(block.handle);
    block.handle = 0;
}

bool keeps_descriptor(const Block& block) {
    if (block.flags & (wire::kExported | wire::kImported)) return true;
    return (block.asked & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) &&
           descriptors::count() < kSpareDescriptors;
}

}  // namespace

Outcome failure(CUresult result, const char* call, uint64_t block) {
    char text[160];
    std::snprintf(text, sizeof text, "%s of block %lu failed with %s", call,
                  static_cast<unsigned long>(block), error_name(result));
    log::note("%s", text);
    return {result == CUDA_ERROR_OUT_OF_MEMORY ? wire::Status::out_of_memory : wire::Status::driver,
            0, text};
}

Listing list(uint64_t after, bool with_descriptors) {
    Listing listing;
    const Lock lock(blocks::mutex);
    auto at = blocks::by_id.upper_bound(after);
    for (; at != blocks::by_id.end() && listing.blocks.size() < wire::kMaxDescriptors; ++at) {
        Block& block = at->second;
        if (block.foreign) continue;
        wire::Block row{block.id, block.mappings.empty() ? 0 : *block.mappings.begin(), block.size,
                        block.device(), block.flags};
        if (block.exportable()) row.flags |= wire::kHasDescriptor;
        if (!block.present) row.flags |= wire::kAway;
        if (with_descriptors && block.exportable()) {
            int descriptor = -1;
            const CUresult result = faults::step(
                Point::export_block, [&] { return blocks::export_descriptor(block, &descriptor); });
            if (result != CUDA_SUCCESS) {
                listing.outcome = failure(result, "exporting", block.id);
                break;
            }
            listing.descriptors.push_back(descriptors::keep(descriptor));
            block.handed_out = true;
            events::handed_out(block.id);
        }
        listing.blocks.push_back(row);
    }
    listing.head.count = static_cast<uint32_t>(listing.blocks.size());
    listing.head.more = at != blocks::by_id.end();
    listing.head.freed = blocks::freed;
    listing.head.last_id = blocks::last_id;
    return listing;
}

Outcome park() {
    const Lock lock(blocks::mutex);
    // It would have no keeper (invariant 2).
    for (const auto& [id, block] : blocks::by_id)
        if (!block.foreign && !block.handed_out && !block.borrowed) {
            const std::string text =
                "block " + std::to_string(id) + " was never exported to a client";
            log::note("not parked: %s", text.c_str());
            return {wire::Status::wrong_state, 0, text};
        }
    for (auto& [id, block] : blocks::by_id)
        if (!block.foreign) blocks::keep_buffer_ids(block);
    blocks::mapped = false;
    Outcome outcome = for_all_mappings(
        "unmapping",
        [](uint64_t address, const Mapping& mapping) {
            return faults::step(Point::unmap, [&] { return unmap_one(address, mapping); });
        },
        [](uint64_t address, const Mapping& mapping) {
            const CUresult result = blocks::map_again(address, mapping);
            if (result != CUDA_SUCCESS) failure(result, "mapping again", mapping.block->id);
        });
    blocks::mapped = outcome.status != wire::Status::ok;
    if (blocks::mapped) return outcome;
    for (auto& [id, block] : blocks::by_id) {
        if (block.foreign) continue;
        const CUresult result = driver.cuMemRelease(block.handle);
        if (result != CUDA_SUCCESS) failure(result, "releasing", id);
        block.handle = 0;
        block.present = false;
        if (block.descriptor >= 0) descriptors::release(block.descriptor);
        block.descriptor = -1;
        ++outcome.count;
    }
    return outcome;
}

Outcome hand_back(const uint64_t* ids, size_t count, std::vector<int>& given) {
    const Lock lock(blocks::mutex);
    Outcome outcome;
    for (size_t i = 0; i < count; ++i) {
        Block* const found = own_block(ids[i]);
        if (!found) return no_block(ids[i], outcome.count);
        Block& block = *found;
        if (block.present) continue;  // the request is repeated
        release_made(block);
        const CUresult result = faults::step(Point::import_block, [&] {
            return driver.cuMemImportFromShareableHandle(
                &block.handle, reinterpret_cast<void*>(static_cast<intptr_t>(given[i])),
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        });
        if (result != CUDA_SUCCESS) return not_imported(result, block.id);
        block.present = true;
        block.borrowed = true;
        event_words::relocate(block);
        if (keeps_descriptor(block)) {
            block.descriptor = given[i];  // entered in the table of descriptors already
            given[i] = -1;
        }
        ++outcome.count;
    }
    return outcome;
}

Outcome make(const std::vector<uint64_t>& ids, std::vector<int>* descriptors) {
    const Lock lock(blocks::mutex);
    Outcome outcome;
    for (const uint64_t id : ids) {
        Block* const block = own_block(id);
        if (!block) return no_block(id, outcome.count);
        if (block->present)
            return {wire::Status::wrong_state, outcome.count,
                    "block " + std::to_string(id) + " is there already"};
        release_made(*block);
        const Current current(contexts::any_on(block->device() < 0 ? 0 : block->device()));
        const CUresult made = faults::step(
            Point::make_block, [&] { return blocks::create_another(*block, &block->handle); });
        if (made != CUDA_SUCCESS) return failure(made, "making", id);
        int descriptor = -1;
        const CUresult result = driver.cuMemExportToShareableHandle(
            &descriptor, block->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (result != CUDA_SUCCESS) return failure(result, "exporting", id);
        descriptors->push_back(descriptors::keep(descriptor));
        ++outcome.count;
    }
    return outcome;
}

Outcome filled(const std::vector<uint64_t>& ids, bool renewed) {
    const Lock lock(blocks::mutex);
    Outcome outcome;
    for (const uint64_t id : ids) {
        Block* const block = own_block(id);
        if (!block) return no_block(id, outcome.count);
        if (block->present) continue;  // the request is repeated
        if (!block->handle)
            return {wire::Status::wrong_state, outcome.count,
                    "block " + std::to_string(id) + " was not made"};
        block->present = true;
        block->borrowed = false;
        block->handed_out = true;
        event_words::relocate(*block);
        if (renewed) blocks::renew(*block);
        events::handed_out(block->id);
        ++outcome.count;
    }
    return outcome;
}

Outcome unpark() {
    const Lock lock(blocks::mutex);
    for (const auto& [id, block] : blocks::by_id)
        if (!block.foreign && !block.present)
            return {wire::Status::wrong_state, 0,
                    "block " + std::to_string(id) + " was not handed back"};
    Outcome outcome = for_all_mappings(
        "mapping",
        [](uint64_t address, const Mapping& mapping) {
            return faults::step(Point::map, [&] { return blocks::map_again(address, mapping); });
        },
        [](uint64_t address, const Mapping& mapping) {
            const CUresult result = unmap_one(address, mapping);
            if (result != CUDA_SUCCESS) failure(result, "unmapping again", mapping.block->id);
        });
    blocks::mapped = outcome.status == wire::Status::ok;
    for (const auto& [id, block] : blocks::by_id) outcome.count += !block.foreign;
    return outcome;
}

bool ever_parked() {
    const Lock lock(blocks::mutex);
    for (const auto& [id, block] : blocks::by_id)
        if (!block.foreign && block.borrowed && !(block.flags & wire::kImported)) return true;
    return false;
}

void newest(uint64_t* last_id, uint64_t* freed) {
    const Lock lock(blocks::mutex);
    *last_id = blocks::last_id;
    *freed = blocks::freed;
}

}  // namespace phos::park
