// What the programs in CUDA C++ share: checked calls, device memory that depends on all steps, and
// the loop that prints a line for each.

#ifndef PHOS_BENCH_NATIVE_H_
#define PHOS_BENCH_NATIVE_H_

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <map>
#include <string>

namespace native {

constexpr int kCount = 1 << 22;
constexpr int kThreads = 256;
constexpr int kBlocks = kCount / kThreads;

inline void require(cudaError_t result, const char* what) {
    if (result != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
        std::exit(1);
    }
}
#define REQUIRE(call) native::require(call, #call)

static __global__ void advance(float* values, int count, float by) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) {
        values[at] = values[at] * 0.999f + by;
    }
}

// A step of a program; returns its value.
using Step = std::function<double()>;
using Ways = std::map<std::string, Step (*)()>;

inline float* filled(int count) {
    float* values = nullptr;
    REQUIRE(cudaMalloc(&values, sizeof(float) * count));
    REQUIRE(cudaMemset(values, 0, sizeof(float) * count));
    return values;
}

inline double last_of(const float* values, int count) {
    float found = 0.0f;
    REQUIRE(cudaMemcpy(&found, values + count - 1, sizeof found, cudaMemcpyDeviceToHost));
    return found;
}

inline double now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Print lines for ever, in the way that the first argument names: number, value in hexadecimal,
// seconds, end on the monotonic clock.
inline int run(int count, char** words, const Ways& ways) {
    const auto found = ways.find(count > 1 ? words[1] : "");
    if (found == ways.end()) {
        std::fprintf(stderr, "usage: %s WAY; see the first lines of its source\n", words[0]);
        return 2;
    }
    const Step step = found->second();
    for (long number = 0;; ++number) {
        const double start = now();
        const double value = step();
        const timespec pause{0, 5'000'000};
        nanosleep(&pause, nullptr);
        const double end = now();
        std::printf("%ld %a %.6f %.6f\n", number, value, end - start, end);
        std::fflush(stdout);
    }
}

}  // namespace native

#endif  // PHOS_BENCH_NATIVE_H_
