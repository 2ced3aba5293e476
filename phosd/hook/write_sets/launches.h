// Predict what kernels may write: every aligned 8-byte word of their parameters that is an address
// in a block may be written through, anywhere in that block, unless the board's table, or phosd's
// analysis of the kernel, knows better.
//
// An address belongs to the mapping that contains it, and to no other. It does not count for the
// mapping that ends there (the end of a range), nor for one that a kernel reaches by adding an
// offset. Such writes, and those through addresses stored in memory, are detected by the digests.
#pragma once

#include <cstring>

#include "code/kernels.h"
#include "code/tensor_maps.h"
#include "ranges/launch_ranges.h"
#include "write_sets/writes.h"

namespace phos::write_sets {

// The range of values taken for addresses. Most parameters are small numbers.
constexpr uint64_t kLowestAddress = 1ull << 21;
constexpr uint64_t kHighestAddress = 1ull << 57;

// Returns the bits of KernelRow::written for `words` words from `first` on; 0 beyond the row.
constexpr uint64_t words_mask(uint64_t first, uint64_t words) {
    return first + words > 64 ? 0 : (~0ull >> (64 - words)) << first;
}

// Visits the words of one parameter, which is at `offset` in the parameter buffer.
template <class Visit>
void each_word_of(const unsigned char* bytes, uint64_t offset, uint64_t size, Visit visit) {
    for (uint64_t at = -offset % 8; at + 8 <= size; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bytes + at, sizeof word);
        if (word - kLowestAddress < kHighestAddress - kLowestAddress)
            visit(word, words_mask((offset + at) / 8, 1));
    }
    if (!tensor_maps::any()) return;
    constexpr uint64_t kSize = sizeof(CUtensorMap);
    for (uint64_t at = -offset % alignof(CUtensorMap); at + kSize <= size;
         at += alignof(CUtensorMap))
        if (const uint64_t address = tensor_maps::address_in(bytes + at))
            visit(address, words_mask((offset + at) / 8, kSize / 8));
}

// Finds where the parameters of a launch are: of each, or of all in one buffer. Returns false if it
// cannot be told.
bool find_arguments(void* const* parameters, void* const* extra, ranges::Arguments* found);

// Calls visit(address, mask) for every word that may be an address. The mask has a bit for each
// word that it came from, counted as in KernelRow::written, or is 0 beyond the row. Returns false
// if the driver does not tell the parameters.
template <class Visit>
bool each_word(const kernels::Kernel& kernel, void* const* parameters, void* const* extra,
               Visit visit) {
    ranges::Arguments arguments;
    if (!find_arguments(parameters, extra, &arguments)) return false;
    if (arguments.parameters) {
        if (!kernel.laid_out) return false;
        for (size_t i = 0; i < kernel.parameters.size(); ++i) {
            const auto& [offset, size] = kernel.parameters[i];
            if (size >= 8 && parameters[i])
                each_word_of(static_cast<const unsigned char*>(parameters[i]), offset, size, visit);
        }
    }
    if (arguments.buffer) each_word_of(arguments.buffer, 0, arguments.size, visit);
    return true;
}

// The sizes of a block and of the grid.
struct Shape {
    uint32_t sizes[6];  // as ranges::Launch
};

template <class Configuration>
Shape shape_of(const Configuration& launch) {
    return {{launch.blockDimX, launch.blockDimY, launch.blockDimZ, launch.gridDimX, launch.gridDimY,
             launch.gridDimZ}};
}

// What the analysis of a kernel tells of one launch.
struct Analysed {
    const summaries::Summary* summary = nullptr;  // null: nothing
    ranges::Accesses found;
    uint64_t inputs[table::kMaxInputs];

    Analysed() = default;
    Analysed(const kernels::Kernel& kernel, const Shape& shape, const ranges::Arguments& arguments);
    kernels::Verdict verdict() const;

    // Calls bytes(address, count) and reach(address) of `written`, as of a Prediction, for what the
    // launch writes. Returns false, without a call, if that is not all told.
    template <class Written>
    bool tell(Written& written) const {
        if (!summary || (found.unknown | found.anywhere) & table::kWritten) return false;
        for (uint32_t i = 0; i < found.range_count; ++i)
            if (found.ranges[i].use & table::kWritten && !ranges::is_whole(found.ranges[i], inputs))
                return false;
        for (uint32_t i = 0; i < found.range_count; ++i)
            if (found.ranges[i].use & table::kWritten)
                written.bytes(ranges::begin_of(found.ranges[i], inputs), found.ranges[i].length);
        for (uint32_t i = 0; i < found.origin_count; ++i)
            if (found.origins[i].use & table::kWritten)
                written.reach(inputs[found.origins[i].input]);
        return true;
    }
};

void predict_kernel(Prediction& prediction, CUfunction function, const Shape& shape,
                    void* const* parameters, void* const* extra);

struct Launched {
    static void predict(Prediction& prediction, CUfunction function, unsigned grid_x,
                        unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned, CUstream, void** parameters,
                        void** extra = nullptr) {
        const Shape shape{{block_x, block_y, block_z, grid_x, grid_y, grid_z}};
        predict_kernel(prediction, function, shape, parameters, extra);
    }
    static void predict(Prediction& prediction, const CUlaunchConfig* launch, CUfunction function,
                        void** parameters, void** extra) {
        if (launch) predict_kernel(prediction, function, shape_of(*launch), parameters, extra);
    }
    static void predict(Prediction& prediction, CUDA_LAUNCH_PARAMS* launches, unsigned count,
                        unsigned) {
        for (unsigned i = 0; launches && i < count; ++i)
            predict_kernel(prediction, launches[i].function, shape_of(launches[i]),
                           launches[i].kernelParams, nullptr);
    }
};

// For parameters that were set one by one before the launch (cuParamSetv): predicts everything.
struct LaunchedBlindly {
    template <class... Rest>
    static void predict(Prediction& prediction, CUfunction function, Rest...) {
        if (function) kernels::count_launch(kernels::find(function), kernels::kUndecided);
        prediction.everything();
    }
};

}  // namespace phos::write_sets
