// The device memory that a program has, by what it calls.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace twice::memory {

using Range = std::pair<uint64_t, uint64_t>;  // begin and end

void add(CUdeviceptr address, size_t bytes);
// Forgets the range that begins at an address.
void remove(CUdeviceptr address);
// Forgets what lies in a range.
void remove(CUdeviceptr address, size_t bytes);

std::vector<Range> all();

// What the words of a launch's parameters point into: the ranges, each once, and how many words
// point into memory that is not known: the host's, or what was allocated otherwise.
struct Pointed {
    std::vector<Range> ranges;
    unsigned strays = 0;
};
Pointed pointed_into(const std::vector<unsigned char>& parameters);

}  // namespace twice::memory
