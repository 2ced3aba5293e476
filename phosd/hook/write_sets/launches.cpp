#include "write_sets/launches.h"

namespace phos::write_sets {

void predict_kernel(Prediction& prediction, CUfunction function, void* const* parameters,
                    void* const* extra) {
    if (!function) return;
    kernels::Kernel* const kernel = kernels::find(function);
    kernels::count_launch(kernel);
    const uint32_t flags = kernel->flags.load(std::memory_order_relaxed);
    if (flags & board::kSuspect) return prediction.everything();
    const uint64_t written =
        flags & board::kWritesOnly ? kernel->written.load(std::memory_order_relaxed) : ~0ull;
    const auto visit = [&](uint64_t address, uint64_t words) {
        if (!words || (words & written)) prediction.reach(address);
    };
    if (!each_word(*kernel, parameters, extra, visit)) prediction.everything();
}

}  // namespace phos::write_sets
