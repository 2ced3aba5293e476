// Say what a launch reads and writes, from the table of its kernel. Results are remembered, by all
// that they depend on: where pointers point to only moves them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "code/kernels.h"
#include "ranges/evaluation.h"

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

// Of a launch. What is in none of the lists is in `unknown`.
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

// What a launch is given.
struct Arguments {
    void* const* parameters;      // each parameter, or null
    const unsigned char* buffer;  // all of them, instead
    size_t size;                  // of the buffer
};

// Sets the inputs that a table wants. Returns false if they are not all there.
bool read_inputs(const kernels::Kernel& kernel, const summaries::Summary& summary,
                 const Arguments& arguments, uint64_t* inputs);

// Returns whether memory would be the same if the launch were run again. `extent_of` sets what is
// allocated around an address; false: nothing that is known.
kernels::Verdict judge(const summaries::Summary& summary, const Accesses& found,
                       const uint64_t* inputs, bool (*extent_of)(uint64_t address, Extent* extent));

// Returns what the launch accesses. `launch` has the inputs from read_inputs().
void find(const summaries::Summary& summary, const Launch& launch, Accesses* found);
// The same, but always computed, with all the time that it may take.
void compute(const summaries::Summary& summary, const Launch& launch, Accesses* found);

// Computes to the end, and remembers, what find() had not the time for, one launch at a call. False
// if nothing is left. Called by the hook's thread.
bool refine();

}  // namespace phos::ranges
