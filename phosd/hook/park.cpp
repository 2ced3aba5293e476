#include "park.h"

#include <unistd.h>

#include <cstdio>

#include "blocks.h"
#include "contexts.h"
#include "descriptors.h"
#include "hook.h"
#include "log.h"

namespace phos::park {
namespace {

using blocks::Block;
using blocks::Mapping;
using Lock = std::lock_guard<std::mutex>;

// Descriptors kept for memory that the program might export, beyond what it has exported.
constexpr unsigned kSpareDescriptors = 256;

Outcome failure(CUresult result, const char* call, uint64_t block) {
    char text[160];
    std::snprintf(text, sizeof text, "%s of block %lu failed with %s", call,
                  static_cast<unsigned long>(block), error_name(result));
    log::note("%s", text);
    return {result == CUDA_ERROR_OUT_OF_MEMORY ? wire::Status::out_of_memory : wire::Status::driver,
            0, text};
}

CUresult map_again(uint64_t address, const Mapping& mapping) {
    CUresult result =
        driver.cuMemMap(address, mapping.size, mapping.offset, mapping.block->handle, 0);
    if (result == CUDA_SUCCESS && !mapping.access.empty()) {
        result = driver.cuMemSetAccess(address, mapping.size, mapping.access.data(),
                                       mapping.access.size());
        if (result != CUDA_SUCCESS) driver.cuMemUnmap(address, mapping.size);
    }
    return result;
}

// Does `step` to every mapping of the hook's, or undoes it where it was done.
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

CUresult unmap_one(uint64_t address, const Mapping& mapping) {
    return driver.cuMemUnmap(address, mapping.size);
}

bool keeps_descriptor(const Block& block) {
    if (block.flags & (wire::kExported | wire::kImported)) return true;
    return (block.asked & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) &&
           descriptors::count() < kSpareDescriptors;
}

// All of a block mapped at an address of the hook's own, to copy from or to.
class Window {
  public:
    Window(CUmemGenericAllocationHandle handle, const Block& block) : size_(block.size) {
        const CUmemAccessDesc access{block.properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        result = driver.cuMemAddressReserve(&address, size_, 0, 0, 0);
        if (result != CUDA_SUCCESS) return;
        result = driver.cuMemMap(address, size_, 0, handle, 0);
        if (result == CUDA_SUCCESS) {
            mapped_ = true;
            result = driver.cuMemSetAccess(address, size_, &access, 1);
        }
    }
    ~Window() {
        if (mapped_) driver.cuMemUnmap(address, size_);
        if (address) driver.cuMemAddressFree(address, size_);
    }
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    CUdeviceptr address = 0;
    CUresult result;

  private:
    uint64_t size_;
    bool mapped_ = false;
};

// Replaces imported memory of a block by memory of the process's own with the same bytes.
CUresult make_own(Block& block) {
    CUcontext context = contexts::any_on(block.device() < 0 ? 0 : block.device());
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    const Current current(context);
    CUmemAllocationProp properties = block.properties;
    properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(
        block.asked | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUmemGenericAllocationHandle own = 0;
    CUresult result = driver.cuMemCreate(&own, block.size, &properties, 0);
    if (result != CUDA_SUCCESS) return result;
    {
        const Window from(block.handle, block);
        const Window to(own, block);
        result = from.result != CUDA_SUCCESS ? from.result : to.result;
        if (result == CUDA_SUCCESS)
            result = driver.cuMemcpyDtoD_v2(to.address, from.address, block.size);
        if (result == CUDA_SUCCESS) result = driver.cuCtxSynchronize();
    }
    for (const uint64_t address : block.mappings) {
        if (result != CUDA_SUCCESS) break;
        result = driver.cuMemUnmap(address, blocks::by_address.at(address).size);
    }
    if (result != CUDA_SUCCESS) {
        // Nothing is lost: the old memory is still there. What was unmapped goes back.
        for (const uint64_t address : block.mappings)
            map_again(address, blocks::by_address.at(address));
        driver.cuMemRelease(own);
        return result;
    }
    driver.cuMemRelease(block.handle);
    block.handle = own;
    block.borrowed = false;
    block.handed_out = false;
    for (const uint64_t address : block.mappings) {
        const CUresult mapped = map_again(address, blocks::by_address.at(address));
        if (mapped != CUDA_SUCCESS) result = mapped;
    }
    return result;
}

}  // namespace

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
        if (with_descriptors && block.exportable()) {
            int descriptor = -1;
            const CUresult result = blocks::export_descriptor(block, &descriptor);
            if (result != CUDA_SUCCESS) {
                listing.outcome = failure(result, "exporting", block.id);
                break;
            }
            listing.descriptors.push_back(descriptors::keep(descriptor));
            block.handed_out = true;
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
    for (const auto& [id, block] : blocks::by_id)
        if (!block.foreign && !block.handed_out && !block.borrowed)
            return {wire::Status::wrong_state, 0,
                    "block " + std::to_string(id) + " was never exported to a client"};
    Outcome outcome =
        for_all_mappings("unmapping", unmap_one, [](uint64_t address, const Mapping& mapping) {
            const CUresult result = map_again(address, mapping);
            if (result != CUDA_SUCCESS) failure(result, "mapping again", mapping.block->id);
        });
    if (outcome.status != wire::Status::ok) return outcome;
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
        const auto found = blocks::by_id.find(ids[i]);
        if (found == blocks::by_id.end() || found->second.foreign)
            return {wire::Status::bad_message, outcome.count,
                    "there is no block " + std::to_string(ids[i])};
        Block& block = found->second;
        if (block.present) continue;  // a repeated request
        const CUresult result = driver.cuMemImportFromShareableHandle(
            &block.handle, reinterpret_cast<void*>(static_cast<intptr_t>(given[i])),
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result != CUDA_SUCCESS) return failure(result, "importing", block.id);
        block.present = true;
        block.borrowed = true;
        if (keeps_descriptor(block)) {
            block.descriptor = given[i];  // kept in the table of descriptors already
            given[i] = -1;
        }
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
    Outcome outcome =
        for_all_mappings("mapping", map_again, [](uint64_t address, const Mapping& mapping) {
            const CUresult result = unmap_one(address, mapping);
            if (result != CUDA_SUCCESS) failure(result, "unmapping again", mapping.block->id);
        });
    for (const auto& [id, block] : blocks::by_id) outcome.count += !block.foreign;
    return outcome;
}

Outcome rehome() {
    const Lock lock(blocks::mutex);
    Outcome outcome;
    for (auto& [id, block] : blocks::by_id) {
        // What a peer holds as well must stay the same memory.
        if (block.foreign || !block.borrowed || block.descriptor >= 0) continue;
        const CUresult result = make_own(block);
        if (result != CUDA_SUCCESS) {
            Outcome failed = failure(result, "making an own copy", id);
            failed.count = outcome.count;
            return failed;
        }
        ++outcome.count;
    }
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
