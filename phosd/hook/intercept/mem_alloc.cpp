// Replace cuMemAlloc and similar functions, and queries about their memory. The answers are those
// of an H200 for memory of cuMemAlloc: the program must not see that its memory can be exported.
#include <cstring>
#include <optional>

#include "base/overrides.h"
#include "base/process.h"
#include "cow/memory_pressure.h"
#include "gate/gate.h"
#include "intercept/legacy_ipc.h"
#include "intercept/managed.h"
#include "intercept/pool_sharing.h"
#include "memory/contexts.h"
#include "memory/heap.h"

namespace phos {
namespace {

constexpr size_t kPitch = 512;

CUresult allocate(CUdeviceptr* address, size_t size) {
    const CUresult permitted = contexts::capture_permits();
    if (permitted != CUDA_SUCCESS) return permitted;
    if (!address || !size) return CUDA_ERROR_INVALID_VALUE;
    CUcontext context = nullptr;
    int device = 0;
    if (!contexts::current(&context, &device)) return driver.cuMemAlloc_v2(address, size);
    std::unique_lock lock(blocks::mutex);
    if (!heap::supports(device)) {
        lock.unlock();
        return driver.cuMemAlloc_v2(address, size);
    }
    heap::Heap* heap = heap::of_context(context, device);
    uint64_t made = 0;
    const CUresult result =
        with_room(lock, device, size, [&] { return heap::allocate(heap, size, &made); });
    if (result == CUDA_SUCCESS) *address = made;
    return result;
}

// Waits as the driver's cuMemFree does, which must not free memory that the device still uses.
CUresult synchronize(CUcontext context, int device) {
    if (!context) context = contexts::any_on(device);
    if (!context) return CUDA_SUCCESS;
    const Current current(context);
    return current ? contexts::synchronize() : CUDA_SUCCESS;
}

template <class T>
void put(void* data, T value) {
    std::memcpy(data, &value, sizeof value);
}

// Answers a query for an attribute of an address in memory that the hook made
// (docs/design/driver.md: truths-take-four-bytes).
CUresult answer(void* data, CUpointer_attribute attribute, uint64_t address,
                const std::pair<const uint64_t, heap::Allocation>& found) {
    const auto& [start, allocation] = found;
    const heap::Heap& heap = *allocation.heap;
    const auto* mapping = blocks::find(address);
    const bool plain = heap.context != nullptr;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            put(data, heap.context);
            break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            put(data, CU_MEMORYTYPE_DEVICE);
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            put<CUdeviceptr>(data, address);
            break;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
            put<int>(data, allocation.synchronous);
            break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            put<unsigned long long>(data, allocation.buffer_id);
            break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            put<int>(data, 0);
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            put(data, heap.device);
            break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            put<int>(data, plain);
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            put<CUdeviceptr>(data, start);
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            put<size_t>(data, allocation.size);
            break;
        case CU_POINTER_ATTRIBUTE_MAPPED:
            put<int>(data, 1);
            break;
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
            put<unsigned long long>(data, 0);
            break;
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
            put<int>(data,
                     plain && mapping->second.block->properties.allocFlags.gpuDirectRDMACapable);
            break;
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
            put(data, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE);
            break;
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
            put(data, heap.pool);
            break;
        case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
            put<size_t>(data, mapping->second.size);
            break;
        case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
            put<CUdeviceptr>(data, mapping->first);
            break;
        case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
            put<unsigned long long>(data, mapping->second.block->id);
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

// Replaces what the driver says of the program's own memory where it is another than natively: the
// hook added a handle type, and after a checkpoint it is other memory.
void answer_as_before(CUpointer_attribute attribute, void* data, CUdeviceptr address) {
    if (!data) return;
    const std::lock_guard lock(blocks::mutex);
    const auto* mapping = blocks::find(address);
    if (!mapping) return;
    if (attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)
        put<unsigned long long>(data, mapping->second.block->asked);
    if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID && mapping->second.buffer_id)
        put<unsigned long long>(data, mapping->second.buffer_id);
}

bool is_mapped_block(CUdeviceptr address) {
    const std::lock_guard lock(blocks::mutex);
    return blocks::find(address) != nullptr;
}

bool is_managed(CUdeviceptr address) {
    uint64_t start, size;
    return managed::range_of(address, &start, &size);
}

}  // namespace

CUresult overrides::cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
    const gate::Pass pass;
    return allocate(address, size);
}

CUresult overrides::cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width,
                                       size_t height, unsigned element) {
    const gate::Pass pass;
    if (!address || !pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    const size_t row = (width + kPitch - 1) / kPitch * kPitch;
    size_t size = 0;
    if (row < width || __builtin_mul_overflow(row, height, &size)) return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult result = allocate(address, size);
    if (result == CUDA_SUCCESS) *pitch = row;
    return result;
}

CUresult overrides::cuMemFree_v2(CUdeviceptr address) {
    const gate::Pass pass;
    const CUresult permitted = contexts::capture_permits();
    if (permitted != CUDA_SUCCESS) return permitted;
    CUcontext context = nullptr;
    int device = 0;
    {
        const std::lock_guard lock(blocks::mutex);
        auto* found = heap::find(address);
        if (found && (found->first != address || found->second.freeing))
            return CUDA_ERROR_INVALID_VALUE;
        if (found) {
            found->second.freeing = true;
            context = found->second.heap->context;
            device = found->second.heap->device;
        } else {
            context = nullptr;
            device = -1;
        }
    }
    if (device < 0) {
        if (const std::optional<CUresult> freed = pool_sharing::free(address)) return *freed;
        const std::optional<CUresult> freed = managed::free(address);
        return freed ? *freed : driver.cuMemFree_v2(address);
    }
    const CUresult result = synchronize(context, device);
    const std::lock_guard lock(blocks::mutex);
    if (result == CUDA_SUCCESS)
        heap::release(address);
    else if (auto* found = heap::find(address))
        found->second.freeing = false;
    return result;
}

CUresult overrides::cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
    {
        const std::lock_guard lock(blocks::mutex);
        uint64_t start = 0;
        uint64_t length = 0;
        if (const auto* found = heap::find(address)) {
            start = found->first;
            length = found->second.size;
        } else if (legacy_ipc::range_of(address, &start, &length) ||
                   managed::range_of(address, &start, &length)) {
            // start and length are set
        } else if (const auto* mapping = blocks::find(address)) {
            // Inside a slab, but in no allocation.
            if (!(mapping->second.block->flags & wire::kProgramVmm)) return CUDA_ERROR_NOT_FOUND;
            start = mapping->first;
            length = mapping->second.size;
        }
        if (length) {
            if (base) *base = start;
            if (size) *size = length;
            return CUDA_SUCCESS;
        }
    }
    return driver.cuMemGetAddressRange_v2(base, size, address);
}

CUresult overrides::cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                          CUdeviceptr address) {
    if (!data) return CUDA_ERROR_INVALID_VALUE;
    {
        const std::lock_guard lock(blocks::mutex);
        if (const auto* found = heap::find(address))
            return answer(data, attribute, address, *found);
    }
    if (!is_mapped_block(address)) {
        const CUresult result = driver.cuPointerGetAttribute(data, attribute, address);
        if (result == CUDA_SUCCESS && is_managed(address)) managed::answer(data, attribute);
        return result;
    }
    const gate::Pass pass;
    const CUresult result = driver.cuPointerGetAttribute(data, attribute, address);
    if (result == CUDA_SUCCESS) answer_as_before(attribute, data, address);
    return result;
}

CUresult overrides::cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes,
                                           void** data, CUdeviceptr address) {
    if (!attributes || !data) return CUDA_ERROR_INVALID_VALUE;
    {
        const std::lock_guard lock(blocks::mutex);
        if (const auto* found = heap::find(address)) {
            // Attributes that do not apply are left out without an error, unlike in the single
            // form.
            for (unsigned i = 0; i < count; ++i)
                if (data[i] && answer(data[i], attributes[i], address, *found) != CUDA_SUCCESS &&
                    attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER)
                    put<void*>(data[i], nullptr);
            return CUDA_SUCCESS;
        }
    }
    if (!is_mapped_block(address)) {
        const CUresult result = driver.cuPointerGetAttributes(count, attributes, data, address);
        for (unsigned i = 0; result == CUDA_SUCCESS && is_managed(address) && i < count; ++i)
            if (data[i]) managed::answer(data[i], attributes[i]);
        return result;
    }
    const gate::Pass pass;
    const CUresult result = driver.cuPointerGetAttributes(count, attributes, data, address);
    for (unsigned i = 0; result == CUDA_SUCCESS && i < count; ++i)
        answer_as_before(attributes[i], data[i], address);
    return result;
}

CUresult overrides::cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                                          CUdeviceptr address) {
    {
        const std::lock_guard lock(blocks::mutex);
        auto* found = heap::find(address);
        if (found && value && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
            unsigned wanted = 0;
            std::memcpy(&wanted, value, sizeof wanted);
            found->second.synchronous = wanted != 0;
            return CUDA_SUCCESS;
        }
        if (found) return CUDA_ERROR_INVALID_VALUE;
    }
    return driver.cuPointerSetAttribute(value, attribute, address);
}

CUresult overrides::cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, size_t size,
                                                  CUmemRangeHandleType type,
                                                  unsigned long long flags) {
    const gate::Pass pass;
    const CUresult result =
        driver.cuMemGetHandleForAddressRange(handle, address, size, type, flags);
    if (result == CUDA_SUCCESS)
        mark_not_parkable(Reason::external_memory,
                          "the program gave device memory to another driver (dma-buf)");
    return result;
}

}  // namespace phos
