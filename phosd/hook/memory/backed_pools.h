// The memory pools that the hook backs.
#pragma once

#include <cstdint>
#include <vector>

#include "base/driver.h"

namespace phos::backed_pools {

// A pool of device memory that the hook backs: the driver's own one stays empty, but for captures.
struct Pool {
    int device = 0;
    bool exportable = false;              // other processes may import it
    bool imported = false;                // from another process; nothing is allocated from it
    std::vector<CUmemAccessDesc> access;  // of an imported one: what the program asked for
    uint64_t threshold = 0;               // bytes to keep, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    uint64_t used_high = 0;
    uint64_t reserved_high = 0;
};

// Returns null for a pool that the driver backs. Needs blocks::mutex.
Pool* find(CUmemoryPool pool);
void add(CUmemoryPool pool, const Pool& backed);  // takes blocks::mutex
void forget(CUmemoryPool pool);                   // the same

}  // namespace phos::backed_pools
