// Say what a launch reads and writes, from the table of its kernel. Results are remembered, by all
// that they depend on: where pointers point to only moves them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "code/kernels.h"
#include "ranges/accesses.h"
#include "ranges/evaluation.h"

namespace phos::ranges {

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
