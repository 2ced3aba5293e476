// Virtual memory management: physical memory by handle, reservations, mappings, access, sharing.
#include <fcntl.h>

#include "api/api.h"

using namespace phos::softgpu;

namespace {

// The ordinal that a location means, -1 for the host.
int ordinal_of(const CUmemLocation& location) {
    switch (location.type) {
        case CU_MEM_LOCATION_TYPE_DEVICE:
            return runtime().device(location.id).ordinal;
        case CU_MEM_LOCATION_TYPE_HOST:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
            return -1;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

void check_properties(const CUmemAllocationProp* properties) {
    require(properties != nullptr && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED);
    constexpr unsigned supported = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    require((static_cast<unsigned>(properties->requestedHandleTypes) & ~supported) == 0,
            CUDA_ERROR_NOT_SUPPORTED);
    ordinal_of(properties->location);
}

bool exportable(const Memory& memory) {
    return memory.properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

}  // namespace

API(cuMemGetAllocationGranularity,
    (size_t* granularity, const CUmemAllocationProp* properties,
     CUmemAllocationGranularity_flags option),
    (granularity, properties, option)) {
    require(granularity != nullptr);
    check_properties(properties);
    require(option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ||
            option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    *granularity = kGranularity;
}

API(cuMemCreate,
    (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp* properties,
     unsigned long long flags),
    (handle, size, properties, flags)) {
    require(handle != nullptr && flags == 0 && size > 0 && size % kGranularity == 0);
    check_properties(properties);
    *handle = runtime().memory.retain(
        Memory::create(size, ordinal_of(properties->location), true, *properties));
}

API(cuMemRelease, (CUmemGenericAllocationHandle handle), (handle)) {
    runtime().memory.release(handle);
}

API(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void* address),
    (handle, address)) {
    require(handle != nullptr);
    const Mapping mapping = runtime().space().find(reinterpret_cast<uint64_t>(address));
    // Memory of cuMemAlloc and of pools has no handle.
    require(mapping.memory && mapping.memory->descriptor() >= 0);
    *handle = runtime().memory.retain(mapping.memory);
}

API(cuMemGetAllocationPropertiesFromHandle,
    (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle), (properties, handle)) {
    require(properties != nullptr);
    *properties = runtime().memory.get(handle)->properties;
}

API(cuMemAddressReserve,
    (CUdeviceptr * address, size_t size, size_t alignment, CUdeviceptr hint,
     unsigned long long flags),
    (address, size, alignment, hint, flags)) {
    require(address != nullptr && flags == 0);
    *address = runtime().space().reserve(size, alignment, hint);
}

API(cuMemAddressFree, (CUdeviceptr address, size_t size), (address, size)) {
    runtime().space().free_reservation(address, size);
}

API(cuMemMap,
    (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
     unsigned long long flags),
    (address, size, offset, handle, flags)) {
    require(flags == 0 && offset == 0);
    runtime().space().map(address, size, offset, runtime().memory.get(handle));
}

API(cuMemUnmap, (CUdeviceptr address, size_t size), (address, size)) {
    runtime().space().unmap(address, size);
}

API(cuMemSetAccess,
    (CUdeviceptr address, size_t size, const CUmemAccessDesc* descriptions, size_t count),
    (address, size, descriptions, count)) {
    require(descriptions != nullptr && count > 0);
    for (size_t i = 0; i < count; ++i) {
        const CUmemAccess_flags flags = descriptions[i].flags;
        require(flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        const int ordinal = ordinal_of(descriptions[i].location);
        if (ordinal < 0) {
            // The host can read what lies in its own memory; a device's memory it cannot.
            const Mapping mapping = runtime().space().find(address);
            require(mapping.memory && mapping.memory->device < 0, CUDA_ERROR_NOT_SUPPORTED);
            runtime().space().set_host_access(address, size,
                                              flags != CU_MEM_ACCESS_FLAGS_PROT_NONE);
            continue;
        }
        if (!runtime().config().peers) {
            const Mapping mapping = runtime().space().find(address);
            require(mapping.memory != nullptr);
            require(mapping.memory->device < 0 || mapping.memory->device == ordinal,
                    CUDA_ERROR_INVALID_DEVICE);
        }
        runtime().space().set_access(address, size, static_cast<unsigned>(ordinal),
                                     flags != CU_MEM_ACCESS_FLAGS_PROT_NONE,
                                     flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
}

API(cuMemGetAccess, (unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address),
    (flags, location, address)) {
    require(flags != nullptr && location != nullptr);
    const int ordinal = ordinal_of(*location);
    const Mapping mapping = runtime().space().find(address);
    require(mapping.memory != nullptr && ordinal >= 0);
    const bool read = mapping.access >> ordinal & 1;
    const bool write = mapping.access >> (ordinal + AddressSpace::kMaxDevices) & 1;
    *flags = write  ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
             : read ? CU_MEM_ACCESS_FLAGS_PROT_READ
                    : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

API(cuMemExportToShareableHandle,
    (void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
     unsigned long long flags),
    (shareable, handle, type, flags)) {
    require(shareable != nullptr && flags == 0);
    require(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    const auto memory = runtime().memory.get(handle);
    // As the driver: what was imported cannot be exported again.
    require(exportable(*memory) && !memory->imported);
    const int descriptor = fcntl(memory->descriptor(), F_DUPFD_CLOEXEC, 0);
    require(descriptor >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *static_cast<int*>(shareable) = descriptor;
}

API(cuMemImportFromShareableHandle,
    (CUmemGenericAllocationHandle * handle, void* shareable, CUmemAllocationHandleType type),
    (handle, shareable, type)) {
    require(handle != nullptr);
    require(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    const auto descriptor = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    *handle = runtime().memory.retain(Memory::import(descriptor));
}
