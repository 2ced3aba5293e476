// Predict what kernels may write: every aligned 8-byte word of their parameters that is an address
// in a block may be written through, anywhere in that block, unless the board's table knows better.
//
// An address belongs to the mapping that contains it, and to no other. It does not count for the
// mapping that ends there (the end of a range), nor for one that a kernel reaches by adding an
// offset. Such writes, and those through addresses stored in memory, are detected by the digests.
#pragma once

#include <cstring>

#include "code/kernels.h"
#include "code/tensor_maps.h"
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

// Calls visit(address, mask) for every word that may be an address. The mask has a bit for each
// word that it came from, counted as in KernelRow::written, or is 0 beyond the row. Returns false
// if the driver does not tell the parameters.
template <class Visit>
bool each_word(const kernels::Kernel& kernel, void* const* parameters, void* const* extra,
               Visit visit) {
    if (parameters) {
        if (!kernel.laid_out) return false;
        for (size_t i = 0; i < kernel.parameters.size(); ++i) {
            const auto& [offset, size] = kernel.parameters[i];
            if (size >= 8 && parameters[i])
                each_word_of(static_cast<const unsigned char*>(parameters[i]), offset, size, visit);
        }
        return true;
    }
    if (!extra) return true;
    const void* buffer = nullptr;
    const size_t* size = nullptr;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = static_cast<const size_t*>(extra[1]);
        else
            return false;
    }
    if (buffer && size) each_word_of(static_cast<const unsigned char*>(buffer), 0, *size, visit);
    return true;
}

void predict_kernel(Prediction& prediction, CUfunction function, void* const* parameters,
                    void* const* extra);

struct Launched {
    static void predict(Prediction& prediction, CUfunction function, unsigned, unsigned, unsigned,
                        unsigned, unsigned, unsigned, unsigned, CUstream, void** parameters,
                        void** extra = nullptr) {
        predict_kernel(prediction, function, parameters, extra);
    }
    static void predict(Prediction& prediction, const CUlaunchConfig*, CUfunction function,
                        void** parameters, void** extra) {
        predict_kernel(prediction, function, parameters, extra);
    }
    static void predict(Prediction& prediction, CUDA_LAUNCH_PARAMS* launches, unsigned count,
                        unsigned) {
        for (unsigned i = 0; launches && i < count; ++i)
            predict_kernel(prediction, launches[i].function, launches[i].kernelParams, nullptr);
    }
};

// For parameters that were set one by one before the launch (cuParamSetv): predicts everything.
struct LaunchedBlindly {
    template <class... Rest>
    static void predict(Prediction& prediction, CUfunction function, Rest...) {
        if (function) kernels::count_launch(kernels::find(function));
        prediction.everything();
    }
};

}  // namespace phos::write_sets
