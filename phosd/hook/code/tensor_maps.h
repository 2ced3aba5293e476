// Record the tensor maps (TMA descriptors) that the program makes, by their bytes: they are opaque,
// and kernels get them by value.
#pragma once

#include <atomic>
#include <cstdint>

namespace phos::tensor_maps {

extern std::atomic<bool> made;
inline bool any() {
    return made.load(std::memory_order_relaxed);
}

// Returns the global address that a tensor map of these 128 bytes was made for; 0 if they are no
// known tensor map. The table is bounded: it drops the oldest in a set. Takes no lock.
uint64_t address_in(const void* bytes);

}  // namespace phos::tensor_maps
