#include "write_sets/launches.h"

#include <algorithm>
#include <iterator>

#include "memory/blocks.h"

namespace phos::write_sets {

Analysed::Analysed(const kernels::Kernel& kernel, const Shape& shape,
                   const ranges::Arguments& arguments) {
    const auto* const known = kernel.summary.load(std::memory_order_acquire);
    if (!known || !ranges::read_inputs(kernel, *known, arguments, inputs)) return;
    ranges::Launch launch{{}, inputs};
    std::copy(std::begin(shape.sizes), std::end(shape.sizes), launch.sizes);
    ranges::find(*known, launch, &found);
    summary = known;
}

kernels::Verdict Analysed::verdict() const {
    if (!summary) return kernels::kUndecided;
    const auto extent_of = [](uint64_t address, ranges::Extent* extent) {
        const std::lock_guard lock(blocks::mutex);
        return blocks::extent_of(address, &extent->begin, &extent->end);
    };
    return ranges::judge(*summary, found, inputs, extent_of);
}

bool find_arguments(void* const* parameters, void* const* extra, ranges::Arguments* found) {
    *found = {parameters, nullptr, 0};
    if (parameters || !extra) return true;
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
    if (buffer && size) *found = {nullptr, static_cast<const unsigned char*>(buffer), *size};
    return true;
}

void predict_kernel(Prediction& prediction, CUfunction function, const Shape& shape,
                    void* const* parameters, void* const* extra) {
    if (!function) return;
    kernels::Kernel* const kernel = kernels::find(function);
    const uint32_t flags = kernel->flags.load(std::memory_order_relaxed);
    ranges::Arguments arguments;
    if (!find_arguments(parameters, extra, &arguments)) {
        kernels::count_launch(kernel, kernels::kUndecided);
        return prediction.everything();
    }
    const Analysed analysed(*kernel, shape, arguments);
    kernels::count_launch(kernel, analysed.verdict());
    if (flags & board::kSuspect) return prediction.everything();
    // What the user trusts precedes the analysis.
    if (!(flags & board::kWritesOnly) && analysed.tell(prediction)) return;
    kernel->guessed.store(true, std::memory_order_relaxed);
    const uint64_t written =
        flags & board::kWritesOnly ? kernel->written.load(std::memory_order_relaxed) : ~0ull;
    const auto visit = [&](uint64_t address, uint64_t words) {
        if (!words || (words & written)) prediction.reach(address);
    };
    if (!each_word(*kernel, parameters, extra, visit)) prediction.everything();
}

}  // namespace phos::write_sets
