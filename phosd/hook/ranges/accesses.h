// What a launch reads and writes, as far as it is known.
#pragma once

#include <cstdint>

#include "protocol/summaries.h"
#include "ranges/sums.h"

namespace phos::ranges {

// Addresses from `begin` on, added to the input `base` if it has one.
struct Range {
    uint64_t begin;
    uint64_t length;
    uint32_t base;
    uint32_t use;  // table::Use
};

// Where it begins in a launch with these inputs, and whether it ends below the end of all
// addresses.
inline uint64_t begin_of(const Range& range, const uint64_t* inputs) {
    return range.begin + (range.base == kNoBase ? 0 : inputs[range.base]);
}
inline bool is_whole(const Range& range, const uint64_t* inputs) {
    return begin_of(range, inputs) + range.length >= range.length;
}

// The memory that a launch accesses. What is in none of the lists is in `unknown`.
struct Accesses {
    static constexpr uint32_t kMostRanges = 28;
    static constexpr uint32_t kMostOrigins = 8;

    uint32_t unknown;   // of which uses not all is known, as bits of table::Use
    uint32_t anywhere;  // whose addresses may come from any word of the parameters, as bits
    uint32_t widened;   // in whose ranges there is more than was found, as bits
    uint32_t range_count;
    uint32_t origin_count;
    Range ranges[kMostRanges];
    // Accesses of which only the allocation is known: that which an input points into.
    struct Origin {
        uint32_t input;
        uint32_t use;  // table::Use, and kAlone
    } origins[kMostOrigins];
    static constexpr uint32_t kAlone = 8;  // some access comes from nowhere else
};

struct Extent {
    uint64_t begin;
    uint64_t end;
};

}  // namespace phos::ranges
