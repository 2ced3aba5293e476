// Tensor maps (TMA descriptors) that the program has made, by their bytes: they are opaque, and a
// kernel gets them by value.
#pragma once

#include <atomic>
#include <cstdint>

namespace phos::tensor_maps {

extern std::atomic<bool> made;
inline bool any() {
    return made.load(std::memory_order_relaxed);
}

// The global address that the 128 bytes were made for; 0 when they are no tensor map that is known.
// The table is bounded: the oldest of those that share a place is forgotten. Takes no lock.
uint64_t address_in(const void* bytes);

}  // namespace phos::tensor_maps
