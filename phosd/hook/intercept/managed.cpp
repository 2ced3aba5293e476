#include "intercept/managed.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "base/overrides.h"
#include "base/process.h"
#include "gate/gate.h"
#include "memory/contexts.h"

namespace phos {
namespace managed {
namespace {

std::mutex mutex;
std::map<uint64_t, size_t> ranges;  // size by first address

bool in_host() {
    static const bool wanted = [] {
        const char* place = std::getenv("PHOS_MANAGED");
        return place && std::strcmp(place, "host") == 0;
    }();
    return wanted;
}

// Returns the range that has all of the bytes; the end if none has.
std::map<uint64_t, size_t>::const_iterator find(uint64_t address, size_t size = 1) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return ranges.end();
    const auto found = --after;
    const uint64_t offset = address - found->first;
    return offset < found->second && size <= found->second - offset ? found : ranges.end();
}

bool has(uint64_t address, size_t size) {
    const std::lock_guard lock(mutex);
    return find(address, size) != ranges.end();
}

// Whether `address` is in managed memory in the host, although not all of `size` bytes may be.
bool begins_in(uint64_t address) {
    return has(address, 1);
}

CUresult allocate(CUdeviceptr* address, size_t size, unsigned flags) {
    if (!address || !size || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult permitted = contexts::capture_permits();
    if (permitted != CUDA_SUCCESS) return permitted;
    void* made = nullptr;
    constexpr unsigned kAll = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
    const CUresult result = driver.cuMemHostAlloc(&made, size, kAll);
    if (result != CUDA_SUCCESS) return result;
    // One address for the host and all devices, as managed memory has.
    CUdeviceptr seen = 0;
    const CUresult mapped = driver.cuMemHostGetDevicePointer_v2(&seen, made, 0);
    if (mapped != CUDA_SUCCESS || seen != reinterpret_cast<uint64_t>(made)) {
        driver.cuMemFreeHost(made);
        return mapped != CUDA_SUCCESS ? mapped : CUDA_ERROR_NOT_SUPPORTED;
    }
    const std::lock_guard lock(mutex);
    ranges[seen] = size;
    *address = seen;
    return CUDA_SUCCESS;
}

// A prefetch, or advice, for a range: success without effect; nothing if it is another's.
std::optional<CUresult> place(uint64_t address, size_t size) {
    if (!begins_in(address)) return std::nullopt;
    return size && has(address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// What the driver says of a range for which nothing was ever asked.
std::optional<CUresult> unplaced(void* data, size_t size, CUmem_range_attribute attribute,
                                 uint64_t address, size_t count) {
    const std::optional<CUresult> known = place(address, count);
    if (!known || *known != CUDA_SUCCESS) return known;
    if (!data || !size || size % sizeof(int)) return CUDA_ERROR_INVALID_VALUE;
    int value = 0;
    switch (attribute) {
        case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
        case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
            break;
        case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
        case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
            value = CU_MEM_LOCATION_TYPE_INVALID;
            break;
        case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
        case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
        case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
            value = CU_DEVICE_INVALID;
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t at = 0; at < size; at += sizeof value)
        std::memcpy(static_cast<char*>(data) + at, &value, sizeof value);
    return CUDA_SUCCESS;
}

}  // namespace

std::optional<CUresult> free(uint64_t address) {
    {
        const std::lock_guard lock(mutex);
        const auto found = find(address);
        if (found == ranges.end()) return std::nullopt;
        if (found->first != address) return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult done = contexts::synchronize();
    if (done != CUDA_SUCCESS) return done;
    {
        // First, since the address may be given to another thread as soon as it is free.
        const std::lock_guard lock(mutex);
        if (!ranges.erase(address)) return CUDA_ERROR_INVALID_VALUE;
    }
    return driver.cuMemFreeHost(reinterpret_cast<void*>(address));
}

bool range_of(uint64_t address, uint64_t* start, uint64_t* size) {
    const std::lock_guard lock(mutex);
    const auto found = find(address);
    if (found == ranges.end()) return false;
    *start = found->first;
    *size = found->second;
    return true;
}

void answer(void* data, CUpointer_attribute attribute) {
    const auto put = [&](int value) { std::memcpy(data, &value, sizeof value); };
    if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) put(1);
    if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) put(CU_MEMORYTYPE_DEVICE);
}

}  // namespace managed

CUresult overrides::cuMemAllocManaged(CUdeviceptr* address, size_t size, unsigned flags) {
    const gate::Pass pass;
    if (managed::in_host()) return managed::allocate(address, size, flags);
    const CUresult result = driver.cuMemAllocManaged(address, size, flags);
    if (result == CUDA_SUCCESS)
        mark_unsupported(Reason::managed_memory,
                         "the program uses managed memory (cuMemAllocManaged); "
                         "`phos run --managed=host` gives it memory that can be saved");
    return result;
}

CUresult overrides::cuMemFreeHost(void* address) {
    if (managed::begins_in(reinterpret_cast<uint64_t>(address))) return CUDA_ERROR_INVALID_VALUE;
    return driver.cuMemFreeHost(address);
}

CUresult overrides::cuMemPrefetchAsync(CUdeviceptr address, size_t size, CUdevice to,
                                       CUstream stream) {
    const gate::Pass pass;
    if (const auto known = managed::place(address, size)) return *known;
    return driver.cuMemPrefetchAsync(address, size, to, stream);
}

CUresult overrides::cuMemPrefetchAsync_ptsz(CUdeviceptr address, size_t size, CUdevice to,
                                            CUstream stream) {
    const gate::Pass pass;
    if (const auto known = managed::place(address, size)) return *known;
    return driver.cuMemPrefetchAsync_ptsz(address, size, to, stream);
}

CUresult overrides::cuMemPrefetchAsync_v2(CUdeviceptr address, size_t size, CUmemLocation to,
                                          unsigned flags, CUstream stream) {
    const gate::Pass pass;
    if (const auto known = managed::place(address, size)) return *known;
    return driver.cuMemPrefetchAsync_v2(address, size, to, flags, stream);
}

CUresult overrides::cuMemPrefetchAsync_v2_ptsz(CUdeviceptr address, size_t size, CUmemLocation to,
                                               unsigned flags, CUstream stream) {
    const gate::Pass pass;
    if (const auto known = managed::place(address, size)) return *known;
    return driver.cuMemPrefetchAsync_v2_ptsz(address, size, to, flags, stream);
}

CUresult overrides::cuMemAdvise(CUdeviceptr address, size_t size, CUmem_advise advice,
                                CUdevice device) {
    const gate::Pass pass;
    if (const auto known = managed::place(address, size)) return *known;
    return driver.cuMemAdvise(address, size, advice, device);
}

CUresult overrides::cuMemAdvise_v2(CUdeviceptr address, size_t size, CUmem_advise advice,
                                   CUmemLocation location) {
    const gate::Pass pass;
    if (const auto known = managed::place(address, size)) return *known;
    return driver.cuMemAdvise_v2(address, size, advice, location);
}

CUresult overrides::cuStreamAttachMemAsync(CUstream stream, CUdeviceptr address, size_t size,
                                           unsigned flags) {
    const gate::Pass pass;
    // A length of 0 means all of it.
    if (const auto known = managed::place(address, size ? size : 1)) return *known;
    return driver.cuStreamAttachMemAsync(stream, address, size, flags);
}

CUresult overrides::cuStreamAttachMemAsync_ptsz(CUstream stream, CUdeviceptr address, size_t size,
                                                unsigned flags) {
    const gate::Pass pass;
    if (const auto known = managed::place(address, size ? size : 1)) return *known;
    return driver.cuStreamAttachMemAsync_ptsz(stream, address, size, flags);
}

CUresult overrides::cuMemRangeGetAttribute(void* data, size_t size, CUmem_range_attribute attribute,
                                           CUdeviceptr address, size_t count) {
    const gate::Pass pass;
    if (const auto known = managed::unplaced(data, size, attribute, address, count)) return *known;
    return driver.cuMemRangeGetAttribute(data, size, attribute, address, count);
}

CUresult overrides::cuMemRangeGetAttributes(void** data, size_t* sizes,
                                            CUmem_range_attribute* attributes, size_t number,
                                            CUdeviceptr address, size_t count) {
    const gate::Pass pass;
    if (!managed::begins_in(address))
        return driver.cuMemRangeGetAttributes(data, sizes, attributes, number, address, count);
    if (!data || !sizes || !attributes) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < number; ++i)
        if (const auto known = managed::unplaced(data[i], sizes[i], attributes[i], address, count);
            !known || *known != CUDA_SUCCESS)
            return known.value_or(CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

}  // namespace phos
