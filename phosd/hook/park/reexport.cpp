#include "park/reexport.h"

#include "base/faults.h"
#include "base/log.h"
#include "memory/blocks.h"
#include "memory/contexts.h"
#include "park/quiesce.h"

namespace phos::reexport {
namespace {

using blocks::Block;
using Lock = std::lock_guard<std::mutex>;

constexpr uint32_t kPatience = 1000;  // milliseconds, to bring the program to rest

// Maps a whole block at one of the hook's addresses, to copy from or to.
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

// Replaces the imported memory of a block by owned memory with the same bytes.
CUresult make_own(Block& block) {
    CUcontext context = contexts::any_on(block.device() < 0 ? 0 : block.device());
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    const Current current(context);
    blocks::keep_buffer_ids(block);
    CUmemGenericAllocationHandle own = 0;
    CUresult result = blocks::create_another(block, &own);
    if (result != CUDA_SUCCESS) return result;
    {
        const Window from(block.handle, block);
        const Window to(own, block);
        result = from.result != CUDA_SUCCESS ? from.result : to.result;
        if (result == CUDA_SUCCESS)
            result = faults::step(faults::Point::rehome, [&] {
                return driver.cuMemcpyDtoD_v2(to.address, from.address, block.size);
            });
        if (result == CUDA_SUCCESS) result = driver.cuCtxSynchronize();
    }
    for (const uint64_t address : block.mappings) {
        if (result != CUDA_SUCCESS) break;
        result = driver.cuMemUnmap(address, blocks::by_address.at(address).size);
    }
    if (result != CUDA_SUCCESS) {
        // Nothing is lost: the old memory still exists. Map again what was unmapped.
        for (const uint64_t address : block.mappings)
            blocks::map_again(address, blocks::by_address.at(address));
        driver.cuMemRelease(own);
        return result;
    }
    driver.cuMemRelease(block.handle);
    block.handle = own;
    block.borrowed = false;
    block.handed_out = false;
    for (const uint64_t address : block.mappings) {
        const CUresult mapped = blocks::map_again(address, blocks::by_address.at(address));
        if (mapped != CUDA_SUCCESS) result = mapped;
    }
    return result;
}

template <class Wanted>
Outcome reexport_where(Wanted wanted) {
    const Lock lock(blocks::mutex);
    Outcome outcome;
    for (auto& [id, block] : blocks::by_id) {
        // Memory that a peer holds as well must stay the same memory.
        if (!blocks::needs_reexport(block) || !wanted(id)) continue;
        const CUresult result = make_own(block);
        if (result != CUDA_SUCCESS) {
            Outcome failed = park::failure(result, "making an own copy", id);
            failed.count = outcome.count;
            return failed;
        }
        ++outcome.count;
    }
    return outcome;
}

}  // namespace

Outcome all() {
    return reexport_where([](uint64_t) { return true; });
}

Outcome some(const std::set<uint64_t>& ids) {
    return reexport_where([&](uint64_t id) { return ids.count(id) != 0; });
}

CUresult for_sharing(uint64_t id) {
    const quiesce::Stop stop(kPatience);
    if (!stop) {
        log::note(
            "block %lu came back from a checkpoint and could not be made the process's own "
            "for sharing: the program did not come to rest",
            static_cast<unsigned long>(id));
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    const Lock lock(blocks::mutex);
    const auto found = blocks::by_id.find(id);
    if (found == blocks::by_id.end() || !blocks::needs_reexport(found->second)) return CUDA_SUCCESS;
    const CUresult result = make_own(found->second);
    if (result == CUDA_SUCCESS)
        blocks::renew(found->second);
    else
        park::failure(result, "making an own copy", id);
    return result;
}

}  // namespace phos::reexport
