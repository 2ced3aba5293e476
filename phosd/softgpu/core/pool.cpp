#include "core/pool.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

bool is_node(int id) {
    const std::string path = "/sys/devices/system/node/node" + std::to_string(id);
    return id == 0 || (id > 0 && access(path.c_str(), F_OK) == 0);
}

// One bit for each device, and one for the host.
unsigned bit_of(const CUmemLocation& location) {
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return 1u << runtime().device(location.id).ordinal;
    require(location.type == CU_MEM_LOCATION_TYPE_HOST ||
            location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA);
    return 1u << kMaxGpus;
}

}  // namespace

PoolKind PoolKind::of(const CUmemLocation& location, CUmemAllocationType type) {
    const bool managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED;
    require(managed || type == CU_MEM_ALLOCATION_TYPE_PINNED);
    switch (location.type) {
        case CU_MEM_LOCATION_TYPE_DEVICE:
            return {type, location.type, runtime().device(location.id).ordinal};
        case CU_MEM_LOCATION_TYPE_HOST:
            return {type, location.type, 0};
        case CU_MEM_LOCATION_TYPE_HOST_NUMA:
            require(is_node(location.id));
            return {type, location.type, location.id};
        case CU_MEM_LOCATION_TYPE_NONE:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
            require(managed);
            return {type, location.type, 0};
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

void Pool::set_access(const CUmemAccessDesc& description) {
    const bool none = description.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
    require(none || description.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            CUDA_ERROR_NOT_SUPPORTED);
    const unsigned bit = bit_of(description.location);
    if (kind.managed()) {
        none ? advised_ &= ~bit : advised_ |= bit;
        return;
    }
    if (description.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {  // the host reaches its own
        require(kind.device() < 0 && !none, CUDA_ERROR_NOT_SUPPORTED);
        return;
    }
    const int ordinal = description.location.id;
    require(ordinal != kind.device() || !none, CUDA_ERROR_INVALID_DEVICE);
    heap.set_access(static_cast<unsigned>(ordinal), !none, !none);
}

CUmemAccess_flags Pool::access(const CUmemLocation& location) const {
    const unsigned bit = bit_of(location);
    const bool own = location.type == CU_MEM_LOCATION_TYPE_DEVICE
                         ? location.id == kind.device() || (heap.access() & bit)
                         : kind.device() < 0;
    return (kind.managed() ? (advised_ & bit) != 0 : own) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                          : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

PoolPtr Pools::add(const PoolKind& kind) {
    all_.push_back(std::make_shared<Pool>(kind));
    handles_.add(all_.back());
    return all_.back();
}

CUmemoryPool Pools::create(const PoolKind& kind) {
    std::lock_guard lock(mutex_);
    return reinterpret_cast<CUmemoryPool>(add(kind).get());
}

Pools::Slot& Pools::slot(const PoolKind& kind) {
    Slot& found = slots_[kind];
    if (!found.standard) found.standard = found.current = add(kind);
    return found;
}

PoolPtr Pools::standard(const PoolKind& kind) {
    std::lock_guard lock(mutex_);
    return slot(kind).standard;
}

PoolPtr Pools::current(const PoolKind& kind) {
    std::lock_guard lock(mutex_);
    return slot(kind).current;
}

void Pools::choose(const PoolKind& kind, const PoolPtr& pool) {
    require(!(kind < pool->kind) && !(pool->kind < kind));
    std::lock_guard lock(mutex_);
    slot(kind).current = pool;
}

void Pools::destroy(CUmemoryPool handle) {
    const PoolPtr pool = get(handle);
    {
        std::lock_guard lock(mutex_);
        if (const auto found = slots_.find(pool->kind); found != slots_.end()) {
            require(pool != found->second.standard);
            if (found->second.current == pool) found->second.current = found->second.standard;
        }
        handles_.remove(handle);
        pool->destroyed = true;
    }
    sweep(pool);
}

PoolPtr Pools::holding(uint64_t address, Allocation* allocation) const {
    std::lock_guard lock(mutex_);
    for (const PoolPtr& pool : all_)
        if ((*allocation = pool->heap.find(address)).size) return pool;
    return nullptr;
}

void Pools::trim(int device) const {
    std::lock_guard lock(mutex_);
    for (const PoolPtr& pool : all_)
        if (pool->kind.device() == device) pool->heap.trim(0);
}

bool Pools::any_managed_memory() const {
    std::lock_guard lock(mutex_);
    return std::any_of(all_.begin(), all_.end(), [](const PoolPtr& pool) {
        return pool->kind.managed() && pool->heap.reserved() > 0;
    });
}

bool Pools::any_imported() const {
    std::lock_guard lock(mutex_);
    return std::any_of(all_.begin(), all_.end(),
                       [](const PoolPtr& pool) { return pool->imported; });
}

void Pools::sweep(const PoolPtr& pool) {
    if (!pool || !pool->destroyed || pool->heap.used() > 0) return;
    std::lock_guard lock(mutex_);
    all_.erase(std::remove(all_.begin(), all_.end(), pool), all_.end());
}

CUresult PoolFree::run(Context&) const {
    heap_.free(address_);
    runtime().pools.sweep(pool_);
    return CUDA_SUCCESS;
}

}  // namespace phos::softgpu
