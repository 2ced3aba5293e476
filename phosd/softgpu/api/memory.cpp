// Device allocations, host memory, and what a pointer is.
#include <sys/mman.h>

#include <algorithm>

#include "api/api.h"
#include "core/graph_memory.h"
#include "core/submit.h"

using namespace phos::softgpu;

namespace phos::softgpu {

uint64_t allocate_host(size_t size, HostRange::Kind kind, unsigned flags,
                       const ContextPtr& context) {
    constexpr size_t page = 4096;
    require(size > 0);
    size = (size + page - 1) / page * page;
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    const auto address = reinterpret_cast<uint64_t>(at);
    runtime().host.add({address, size, kind, flags, 0, context});
    runtime().space().add_host(address, size, true);
    return address;
}

void release_host(const HostRange& range) {
    runtime().space().remove_host(range.address, range.size);
    if (range.kind != HostRange::Kind::registered)
        munmap(reinterpret_cast<void*>(range.address), range.size);
}

}  // namespace phos::softgpu

namespace {

void free_device(CUdeviceptr address) {
    if (address == 0) return forbid_during_capture();
    const ContextPtr context = current();
    forbid_during_capture();
    if (runtime().host.find(address).address == address &&
        runtime().host.find(address).kind == HostRange::Kind::managed) {
        runtime().wait_for_device(context->device);
        release_host(
            runtime().host.remove(address, {HostRange::Kind::managed}, CUDA_ERROR_INVALID_VALUE));
        return;
    }
    if (const auto of_graph = GraphMemory::find(address)) {
        of_graph->give_back();
        runtime().wait_for_device(of_graph->device);
        return;
    }
    Allocation allocation;
    PoolPtr pool;
    Heap* heap = runtime().heap_of(address, &allocation, &pool);
    require(heap != nullptr && allocation.address == address && heap->retire(address));
    // As the driver's, a free waits for all work that may use the memory.
    const auto alone = context->keep_submissions_out();
    for (int ordinal = 0; ordinal < runtime().device_count(); ++ordinal)
        runtime().wait_for_device(ordinal);
    heap->free(address);
    runtime().pools.sweep(pool);
}

void require_managed(CUdeviceptr address, size_t size) {
    const HostRange range = runtime().host.find(address);
    require(range.size && range.kind == HostRange::Kind::managed);
    require(size > 0 && size <= range.size - (address - range.address));
}

void get_range(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
    current();
    uint64_t start = 0;
    size_t bytes = 0;
    Allocation allocation;
    if (runtime().heap_of(address, &allocation)) {
        start = allocation.address;
        bytes = allocation.size;
    } else if (const Mapping mapping = runtime().space().find(address); mapping.memory) {
        start = mapping.address;
        bytes = mapping.size;
    } else if (const HostRange range = runtime().host.find(address); range.size) {
        start = range.address;
        bytes = range.size;
    }
    require(bytes > 0, CUDA_ERROR_NOT_FOUND);
    if (base) *base = start;
    if (size) *size = bytes;
}

}  // namespace

API(cuMemGetInfo_v2, (size_t* free, size_t* total), (free, total)) {
    const ContextPtr context = current();
    Registry& registry = runtime().device(context->device).registry();
    if (free) *free = registry.total() - registry.used();
    if (total) *total = registry.total();
}

API(cuMemAlloc_v2, (CUdeviceptr * address, size_t size), (address, size)) {
    require(address != nullptr);
    const ContextPtr context = current();
    forbid_during_capture();
    *address = runtime().allocate(runtime().device(context->device).heap, context->device, size,
                                  context.get());
}

API(cuMemAllocPitch_v2,
    (CUdeviceptr * address, size_t* pitch, size_t width, size_t height, unsigned element),
    (address, pitch, width, height, element)) {
    require(address != nullptr && pitch != nullptr && width > 0 && height > 0);
    require(element == 4 || element == 8 || element == 16);
    const ContextPtr context = current();
    forbid_during_capture();
    const size_t row = (width + Heap::kAlignment - 1) / Heap::kAlignment * Heap::kAlignment;
    require(height <= AddressSpace::kSize / row, CUDA_ERROR_OUT_OF_MEMORY);
    *address = runtime().allocate(runtime().device(context->device).heap, context->device,
                                  row * height, context.get());
    *pitch = row;
}

API(cuMemFree_v2, (CUdeviceptr address), (address)) {
    free_device(address);
}

API(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t* size, CUdeviceptr address),
    (base, size, address)) {
    get_range(base, size, address);
}

API(cuMemAllocHost_v2, (void** memory, size_t size), (memory, size)) {
    require(memory != nullptr);
    *memory = reinterpret_cast<void*>(allocate_host(size, HostRange::Kind::pinned, 0, current()));
}

API(cuMemHostAlloc, (void** memory, size_t size, unsigned flags), (memory, size, flags)) {
    constexpr unsigned known =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    require(memory != nullptr && (flags & ~known) == 0);
    *memory =
        reinterpret_cast<void*>(allocate_host(size, HostRange::Kind::pinned, flags, current()));
}

API(cuMemFreeHost, (void* memory), (memory)) {
    const HostRange range = runtime().host.remove(
        reinterpret_cast<uint64_t>(memory), {HostRange::Kind::pinned}, CUDA_ERROR_INVALID_VALUE);
    runtime().wait_for_device(range.context->device);
    release_host(range);
}

API(cuMemHostRegister_v2, (void* memory, size_t size, unsigned flags), (memory, size, flags)) {
    constexpr unsigned known =
        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
    require(memory != nullptr && size > 0);
    require((flags & CU_MEMHOSTREGISTER_IOMEMORY) == 0, CUDA_ERROR_NOT_SUPPORTED);
    require((flags & ~known) == 0);
    const ContextPtr context = current();
    const auto address = reinterpret_cast<uint64_t>(memory);
    require(!Space::inside(address));
    runtime().host.add({address, size, HostRange::Kind::registered, flags, 0, context});
    runtime().space().add_host(address, size, !(flags & CU_MEMHOSTREGISTER_READ_ONLY));
}

API(cuMemHostUnregister, (void* memory), (memory)) {
    const HostRange range =
        runtime().host.remove(reinterpret_cast<uint64_t>(memory), {HostRange::Kind::registered},
                              CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    runtime().wait_for_device(range.context->device);
    release_host(range);
}

API(cuMemHostGetDevicePointer_v2, (CUdeviceptr * address, void* memory, unsigned flags),
    (address, memory, flags)) {
    require(address != nullptr && flags == 0);
    require(runtime().host.find(reinterpret_cast<uint64_t>(memory)).size > 0);
    *address = reinterpret_cast<CUdeviceptr>(memory);
}

API(cuMemHostGetFlags, (unsigned* flags, void* memory), (flags, memory)) {
    require(flags != nullptr);
    const HostRange range = runtime().host.find(reinterpret_cast<uint64_t>(memory));
    require(range.size > 0);
    *flags = range.flags | CU_MEMHOSTALLOC_DEVICEMAP;
}

API(cuMemAllocManaged, (CUdeviceptr * address, size_t size, unsigned flags),
    (address, size, flags)) {
    require(address != nullptr);
    require(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST);
    *address = allocate_host(size, HostRange::Kind::managed, flags, current());
}

// Every device and the host reach managed memory at all times, wherever it should be.
STREAM_API(cuMemPrefetchAsync_v2,
           (CUdeviceptr address, size_t size, CUmemLocation, unsigned flags, CUstream stream),
           (address, size, {}, flags, stream)) {
    require(flags == 0);
    require_managed(address, size);
    stream_of(stream);
}

API(cuMemAdvise_v2, (CUdeviceptr address, size_t size, CUmem_advise, CUmemLocation),
    (address, size, {}, {})) {
    require_managed(address, size);
}

API(cuMemRangeGetAttribute,
    (void* data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address, size_t count),
    (data, size, attribute, address, count)) {
    require(data != nullptr && size == sizeof(int));
    require_managed(address, count);
    // Advice is not remembered.
    require(attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CUDA_ERROR_NOT_SUPPORTED);
    const int none = 0;
    std::memcpy(data, &none, sizeof none);
}
