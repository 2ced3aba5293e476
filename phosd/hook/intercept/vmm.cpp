// Replace the program's own virtual memory management: real memory, but handles of the hook.
#include <fcntl.h>

#include <vector>

#include "base/descriptors.h"
#include "base/overrides.h"
#include "base/process.h"
#include "cow/memory_pressure.h"
#include "gate/gate.h"
#include "memory/blocks.h"
#include "park/reexport.h"

namespace phos {
namespace {

using Handle = CUmemGenericAllocationHandle;
using Lock = std::lock_guard<std::mutex>;

// Calls `use` with the block behind one of the program's handles.
template <class Use>
CUresult with_block(Handle handle, Use use) {
    const gate::Pass pass;
    const Lock lock(blocks::mutex);
    blocks::Block* block = blocks::behind(handle);
    return block ? use(*block) : CUDA_ERROR_INVALID_VALUE;
}

// Registers a handle that is not the hook's memory; the driver keeps and saves it.
Handle adopt_foreign(Handle real, const CUmemAllocationProp& properties, uint64_t size) {
    blocks::Block* block = blocks::adopt(real, properties, size, wire::kProgramVmm);
    block->foreign = true;
    block->references = 1;
    return blocks::virtual_handle(*block);
}

CUresult map_arrays(CUarrayMapInfo* list, unsigned count, CUstream stream,
                    decltype(&::cuMemMapArrayAsync) real) {
    const gate::Pass pass;
    if (!list) return real(list, count, stream);
    std::vector<CUarrayMapInfo> translated(list, list + count);
    const Lock lock(blocks::mutex);
    for (CUarrayMapInfo& entry : translated) {
        if (entry.memOperationType != CU_MEM_OPERATION_TYPE_MAP) continue;
        blocks::Block* block = blocks::behind(entry.memHandle.memHandle);
        if (!block) return CUDA_ERROR_INVALID_VALUE;
        entry.memHandle.memHandle = block->handle;
    }
    const CUresult result = real(translated.data(), count, stream);
    if (result == CUDA_SUCCESS)
        mark_not_parkable(Reason::sparse_array, "the program maps memory into sparse arrays");
    return result;
}

// Callback for reexport::sharing.
CUresult share(void* shareable, Handle handle, CUmemAllocationHandleType type,
               unsigned long long flags, uint64_t* to_reexport) {
    return with_block(handle, [&](blocks::Block& block) {
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || block.foreign) {
            const CUresult result =
                driver.cuMemExportToShareableHandle(shareable, block.handle, type, flags);
            if (result == CUDA_SUCCESS)
                mark_not_parkable(Reason::foreign_handle,
                                  "the program shares memory by a handle that is no descriptor");
            return result;
        }
        // The driver could export it, but the program did not request this handle type.
        if (!shareable || flags || !(block.asked & type) || (block.flags & wire::kImported))
            return CUDA_ERROR_INVALID_VALUE;
        if (blocks::needs_reexport(block)) {
            *to_reexport = block.id;
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        int descriptor = -1;
        const CUresult result = blocks::export_descriptor(block, &descriptor);
        if (result != CUDA_SUCCESS) return result;
        if (block.descriptor < 0)
            block.descriptor = descriptors::keep(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
        block.flags |= wire::kExported;
        *static_cast<int*>(shareable) = descriptor;
        return CUDA_SUCCESS;
    });
}

}  // namespace

CUresult overrides::cuMemCreate(Handle* handle, size_t size, const CUmemAllocationProp* properties,
                                unsigned long long flags) {
    const gate::Pass pass;
    if (!handle || !properties || flags) return driver.cuMemCreate(handle, size, properties, flags);
    std::unique_lock lock(blocks::mutex);
    blocks::Block* block = nullptr;
    const int device =
        properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? properties->location.id : -1;
    const CUresult result = with_room(lock, device, size, [&] {
        return blocks::create(*properties, size, wire::kProgramVmm, &block);
    });
    if (result != CUDA_SUCCESS) return result;
    block->references = 1;
    *handle = blocks::virtual_handle(*block);
    return CUDA_SUCCESS;
}

CUresult overrides::cuMemRelease(Handle handle) {
    return with_block(handle, [](blocks::Block& block) {
        --block.references;
        blocks::drop_if_unused(&block);
        return CUDA_SUCCESS;
    });
}

CUresult overrides::cuMemMap(CUdeviceptr address, size_t size, size_t offset, Handle handle,
                             unsigned long long flags) {
    return with_block(handle, [&](blocks::Block& block) {
        return blocks::map(&block, address, size, offset, flags);
    });
}

CUresult overrides::cuMemUnmap(CUdeviceptr address, size_t size) {
    const gate::Pass pass;
    const Lock lock(blocks::mutex);
    return blocks::unmap(address, size);
}

CUresult overrides::cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access,
                                   size_t count) {
    const gate::Pass pass;
    if (!access) return driver.cuMemSetAccess(address, size, access, count);
    const Lock lock(blocks::mutex);
    return blocks::set_access(address, size, access, count);
}

CUresult overrides::cuMemExportToShareableHandle(void* shareable, Handle handle,
                                                 CUmemAllocationHandleType type,
                                                 unsigned long long flags) {
    return reexport::sharing(
        [=](uint64_t* id) { return share(shareable, handle, type, flags, id); });
}

CUresult overrides::cuMemImportFromShareableHandle(Handle* handle, void* shareable,
                                                   CUmemAllocationHandleType type) {
    const gate::Pass pass;
    Handle real = 0;
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = driver.cuMemImportFromShareableHandle(&real, shareable, type);
    if (result != CUDA_SUCCESS) return result;
    CUmemAllocationProp properties{};
    driver.cuMemGetAllocationPropertiesFromHandle(&properties, real);
    const Lock lock(blocks::mutex);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        mark_not_parkable(Reason::foreign_handle,
                          "the program imports memory by a handle that is no descriptor");
        *handle = adopt_foreign(real, properties, 0);
        return CUDA_SUCCESS;
    }
    blocks::Block* block = blocks::adopt(real, properties, 0, wire::kProgramVmm | wire::kImported);
    block->asked = properties.requestedHandleTypes;
    block->borrowed = true;
    block->references = 1;
    const int given = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    block->descriptor = descriptors::keep(fcntl(given, F_DUPFD_CLOEXEC, 0));
    if (block->descriptor < 0)
        mark_not_parkable(Reason::no_descriptor,
                          "no descriptor was left to keep imported memory by; raise `ulimit -n`");
    *handle = blocks::virtual_handle(*block);
    return CUDA_SUCCESS;
}

CUresult overrides::cuMemRetainAllocationHandle(Handle* handle, void* address) {
    const gate::Pass pass;
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(blocks::mutex);
    if (const auto* found = blocks::find(reinterpret_cast<uint64_t>(address))) {
        blocks::Block* block = found->second.block;
        if (!(block->flags & wire::kProgramVmm)) return CUDA_ERROR_INVALID_VALUE;  // as natively
        ++block->references;
        *handle = blocks::virtual_handle(*block);
        return CUDA_SUCCESS;
    }
    Handle real = 0;
    const CUresult result = driver.cuMemRetainAllocationHandle(&real, address);
    if (result == CUDA_SUCCESS) *handle = adopt_foreign(real, {}, 0);
    return result;
}

CUresult overrides::cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                           Handle handle) {
    return with_block(handle, [&](blocks::Block& block) {
        const CUresult result =
            driver.cuMemGetAllocationPropertiesFromHandle(properties, block.handle);
        if (result == CUDA_SUCCESS && !block.foreign)
            properties->requestedHandleTypes = block.asked;
        return result;
    });
}

CUresult overrides::cuMemMapArrayAsync(CUarrayMapInfo* list, unsigned count, CUstream stream) {
    return map_arrays(list, count, stream, driver.cuMemMapArrayAsync);
}
CUresult overrides::cuMemMapArrayAsync_ptsz(CUarrayMapInfo* list, unsigned count, CUstream stream) {
    return map_arrays(list, count, stream, driver.cuMemMapArrayAsync_ptsz);
}

CUresult overrides::cuMulticastCreate(Handle* handle, const CUmulticastObjectProp* properties) {
    const gate::Pass pass;
    Handle real = 0;
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = driver.cuMulticastCreate(&real, properties);
    if (result != CUDA_SUCCESS) return result;
    mark_not_parkable(Reason::multicast, "the program uses multicast memory");
    const Lock lock(blocks::mutex);
    *handle = adopt_foreign(real, {}, properties->size);
    return CUDA_SUCCESS;
}

CUresult overrides::cuMulticastAddDevice(Handle handle, CUdevice device) {
    return with_block(handle, [&](blocks::Block& multicast) {
        return driver.cuMulticastAddDevice(multicast.handle, device);
    });
}

CUresult overrides::cuMulticastBindMem(Handle handle, size_t offset, Handle memory,
                                       size_t memory_offset, size_t size,
                                       unsigned long long flags) {
    return with_block(handle, [&](blocks::Block& multicast) {
        const blocks::Block* block = blocks::behind(memory);
        if (!block) return CUDA_ERROR_INVALID_VALUE;
        return driver.cuMulticastBindMem(multicast.handle, offset, block->handle, memory_offset,
                                         size, flags);
    });
}

CUresult overrides::cuMulticastBindAddr(Handle handle, size_t offset, CUdeviceptr address,
                                        size_t size, unsigned long long flags) {
    return with_block(handle, [&](blocks::Block& multicast) {
        return driver.cuMulticastBindAddr(multicast.handle, offset, address, size, flags);
    });
}

CUresult overrides::cuMulticastUnbind(Handle handle, CUdevice device, size_t offset, size_t size) {
    return with_block(handle, [&](blocks::Block& multicast) {
        return driver.cuMulticastUnbind(multicast.handle, device, offset, size);
    });
}

}  // namespace phos
