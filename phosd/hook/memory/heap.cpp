#include "memory/heap.h"

#include <algorithm>

#include "base/log.h"
#include "memory/contexts.h"

namespace phos::heap {
namespace {

constexpr uint64_t kSmall = 1 << 20;

std::map<CUcontext, std::unique_ptr<Heap>> of_contexts;
std::map<CUmemoryPool, std::unique_ptr<Heap>> of_pools;
std::vector<std::unique_ptr<Heap>> orphans;
std::map<uint64_t, Allocation> allocations;
uint64_t buffer_ids = 0;

struct Device {
    bool supported = false;
    bool rdma = false;
    uint64_t granularity = 1;  // what divides is never 0
};

CUmemAllocationProp properties_on(int device, bool rdma) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    properties.allocFlags.gpuDirectRDMACapable = rdma;
    return properties;
}

const Device& traits(int device) {
    static std::map<int, Device> known;
    const auto [at, fresh] = known.try_emplace(device);
    if (!fresh) return at->second;
    const auto has = [device](CUdevice_attribute attribute) {
        int value = 0;
        return driver.cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS && value;
    };
    Device& found = at->second;
    found.rdma = has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    const CUmemAllocationProp properties = properties_on(device, found.rdma);
    size_t granularity = 0;
    found.supported =
        has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
        has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) &&
        driver.cuMemGetAllocationGranularity(&granularity, &properties,
                                             CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS &&
        granularity;
    if (granularity) found.granularity = granularity;
    if (!found.supported)
        log::note("device %d has no exportable memory: left to the driver", device);
    return found;
}

// Reserves, creates and maps a block, accessible to all devices with access rights.
CUresult make_backing(Heap* heap, uint64_t size, uint64_t* address) {
    CUdeviceptr at = 0;
    CUresult result = driver.cuMemAddressReserve(&at, size, 0, 0, 0);
    if (result != CUDA_SUCCESS) return result;
    blocks::Block* block = nullptr;
    const CUmemAllocationProp properties = properties_on(heap->device, traits(heap->device).rdma);
    result = blocks::create(properties, size, 0, &block);
    if (result == CUDA_SUCCESS) {
        result = blocks::map(block, at, size, 0);
        if (result == CUDA_SUCCESS) {
            result = blocks::set_access(at, size, heap->access.data(), heap->access.size());
            if (result != CUDA_SUCCESS) blocks::unmap(at, size);
        } else {
            blocks::drop_if_unused(block);
        }
    }
    if (result != CUDA_SUCCESS) {
        driver.cuMemAddressFree(at, size);
        return result;
    }
    heap->reserved += size;
    *address = at;
    return CUDA_SUCCESS;
}

void free_backing(Heap* heap, uint64_t address) {
    const uint64_t size = blocks::by_address.at(address).size;
    CUresult result = blocks::unmap(address, size);
    if (result == CUDA_SUCCESS) result = driver.cuMemAddressFree(address, size);
    if (result != CUDA_SUCCESS) log::note("freeing %#lx: %s", address, error_name(result));
    heap->reserved -= size;
}

CUmemAccessDesc read_write(int device) {
    return {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}

std::unique_ptr<Heap> make_heap(CUcontext context, CUmemoryPool pool, int device) {
    auto heap = std::make_unique<Heap>();
    heap->device = device;
    heap->context = context;
    heap->pool = pool;
    heap->access.push_back(read_write(device));
    return heap;
}

}  // namespace

Heap* of_context(CUcontext context, int device) {
    auto& heap = of_contexts[context];
    if (!heap) {
        heap = make_heap(context, nullptr, device);
        for (const int peer : contexts::peers_of(device)) heap->access.push_back(read_write(peer));
    }
    return heap.get();
}

Heap* of_pool(CUmemoryPool pool, int device) {
    auto& heap = of_pools[pool];
    if (!heap) heap = make_heap(nullptr, pool, device);
    return heap.get();
}

Heap* find_context(CUcontext context) {
    const auto found = of_contexts.find(context);
    return found == of_contexts.end() ? nullptr : found->second.get();
}

Heap* find_pool(CUmemoryPool pool) {
    const auto found = of_pools.find(pool);
    return found == of_pools.end() ? nullptr : found->second.get();
}

uint64_t reserved_for(const Heap* heap, uint64_t size) {
    const auto round = [size](uint64_t unit) { return (size + unit - 1) / unit * unit; };
    const uint64_t share = round(Arena::kAlignment);
    return share <= kSmall ? share : round(traits(heap->device).granularity);
}

CUresult allocate(Heap* heap, uint64_t size, uint64_t* address) {
    if (size > (1ull << 47)) return CUDA_ERROR_OUT_OF_MEMORY;
    const uint64_t reserved = reserved_for(heap, size);
    if (reserved > kSmall) {
        const CUresult result = make_backing(heap, reserved, address);
        if (result != CUDA_SUCCESS) return result;
    } else if (!(*address = heap->arena.take(reserved))) {
        const uint64_t slab = std::max(traits(heap->device).granularity, 2 * kSmall);
        uint64_t base = 0;
        const CUresult result = make_backing(heap, slab, &base);
        if (result != CUDA_SUCCESS) return result;
        heap->arena.add_slab(base, slab);
        *address = heap->arena.take(reserved);
    }
    heap->used += reserved;
    allocations[*address] = Allocation{size, reserved, heap, ++buffer_ids};
    return CUDA_SUCCESS;
}

Allocation retire(uint64_t address) {
    const Allocation retired = allocations.at(address);
    allocations.erase(address);
    retired.heap->used -= retired.reserved;
    return retired;
}

void revive(uint64_t address, const Allocation& retired, uint64_t size) {
    retired.heap->used += retired.reserved;
    allocations[address] = Allocation{size, retired.reserved, retired.heap, ++buffer_ids};
}

void give_back(uint64_t address, const Allocation& retired) {
    Heap* heap = retired.heap;
    if (retired.reserved > kSmall) {
        free_backing(heap, address);
        return;
    }
    heap->arena.give(address, retired.reserved);
    // Keep one slab, or programs that allocate and free in turn would map one each time.
    if (const uint64_t slab = heap->arena.remove_empty(1)) free_backing(heap, slab);
}

void release(uint64_t address) {
    give_back(address, retire(address));
}

void release_all(Heap* heap) {
    std::vector<uint64_t> mine;
    for (const auto& [address, allocation] : allocations)
        if (allocation.heap == heap) mine.push_back(address);
    for (const uint64_t address : mine) release(address);
}

bool trim(Heap* heap) {
    bool any = false;
    while (const uint64_t slab = heap->arena.remove_empty(0)) {
        free_backing(heap, slab);
        any = true;
    }
    return any;
}

bool trim_all() {
    bool any = false;
    for (const auto& [context, heap] : of_contexts) any |= trim(heap.get());
    for (const auto& [pool, heap] : of_pools) any |= trim(heap.get());
    return any;
}

std::pair<const uint64_t, Allocation>* find(uint64_t address) {
    auto at = allocations.upper_bound(address);
    if (at == allocations.begin()) return nullptr;
    --at;
    return address - at->first < at->second.size ? &*at : nullptr;
}

CUresult change_access(Heap* heap, const CUmemAccessDesc* access, size_t count) {
    for (auto& [address, mapping] : blocks::by_address) {
        const bool slab = heap->arena.has_slab(address);
        const auto allocation = slab ? allocations.end() : allocations.find(address);
        if (!slab && (allocation == allocations.end() || allocation->second.heap != heap)) continue;
        const CUresult result = blocks::set_access(address, mapping.size, access, count);
        if (result != CUDA_SUCCESS) return result;
    }
    for (size_t i = 0; i < count; ++i) {
        const auto same = std::find_if(heap->access.begin(), heap->access.end(),
                                       [&](const CUmemAccessDesc& known) {
                                           return known.location.type == access[i].location.type &&
                                                  known.location.id == access[i].location.id;
                                       });
        if (same != heap->access.end()) heap->access.erase(same);
        if (access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) heap->access.push_back(access[i]);
    }
    return CUDA_SUCCESS;
}

void orphan_pool(CUmemoryPool pool) {
    const auto found = of_pools.find(pool);
    if (found == of_pools.end()) return;
    trim(found->second.get());
    orphans.push_back(std::move(found->second));
    of_pools.erase(found);
}

bool supports(int device) {
    return traits(device).supported;
}

void drop_context(CUcontext context) {
    const auto found = of_contexts.find(context);
    if (found == of_contexts.end()) return;
    trim(found->second.get());
    of_contexts.erase(found);
}

void set_peer_access(int owner, int accessor, bool allow) {
    CUmemAccessDesc access = read_write(accessor);
    if (!allow) access.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    const std::lock_guard lock(blocks::mutex);
    for (const auto& [context, heap] : of_contexts) {
        if (heap->device != owner || accessor == owner) continue;
        const CUresult result = change_access(heap.get(), &access, 1);
        if (result != CUDA_SUCCESS)
            log::note("peer access of device %d to %d: %s", accessor, owner, error_name(result));
    }
}

}  // namespace phos::heap
