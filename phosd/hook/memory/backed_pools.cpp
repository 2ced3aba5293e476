#include "memory/backed_pools.h"

#include <map>

#include "memory/blocks.h"

namespace phos::backed_pools {
namespace {

std::map<CUmemoryPool, Pool> pools;  // guarded by blocks::mutex

}  // namespace

Pool* find(CUmemoryPool pool) {
    const auto found = pools.find(pool);
    if (found != pools.end()) return &found->second;
    int count = 0;
    if (!driver.cuDeviceGetDefaultMemPool || driver.cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return nullptr;
    for (int device = 0; device < count; ++device) {
        CUmemoryPool standard = nullptr;
        if (driver.cuDeviceGetDefaultMemPool(&standard, device) != CUDA_SUCCESS || standard != pool)
            continue;
        Pool& added = pools[pool];
        added.device = device;
        return &added;
    }
    return nullptr;
}

void add(CUmemoryPool pool, const Pool& backed) {
    const std::lock_guard lock(blocks::mutex);
    pools[pool] = backed;
}

void forget(CUmemoryPool pool) {
    const std::lock_guard lock(blocks::mutex);
    pools.erase(pool);
}

}  // namespace phos::backed_pools
