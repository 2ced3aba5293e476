// What the hook adds to a gated call: the exported name, which the hook answers, and the driver's
// own function take turns, so that both see the same machine. Prints one JSON line.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>

#include "check.h"

using namespace phos::test;

namespace {

constexpr int kRounds = 1000;
constexpr int kCalls = 2000;

using Call = decltype(&cuStreamWaitEvent);

// To wait for an event that was never recorded is a call that ends at once.
double nanoseconds(Call call, CUstream stream, CUevent event) {
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) OK(call(stream, event, 0));
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    return took.count() / kCalls;
}

// The dlsym of libc, which the hook stands before, finds the driver's own.
Call driver_function(const char* name) {
    void* const real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    CHECK(real && library);
    void* const found = reinterpret_cast<void* (*)(void*, const char*)>(real)(library, name);
    CHECK(found && found != reinterpret_cast<void*>(&cuStreamWaitEvent));
    return reinterpret_cast<Call>(found);
}

}  // namespace

int main() {
    start_cuda();
    CUstream stream = nullptr;
    CUevent event = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const Call direct = driver_function("cuStreamWaitEvent");
    // The best of many rounds: whatever else runs on the machine only adds.
    double hooked = nanoseconds(cuStreamWaitEvent, stream, event);
    double plain = nanoseconds(direct, stream, event);
    for (int round = 1; round < kRounds; ++round) {
        hooked = std::min(hooked, nanoseconds(cuStreamWaitEvent, stream, event));
        plain = std::min(plain, nanoseconds(direct, stream, event));
    }
    std::printf(
        "{\"case\": \"gated call\", \"hooked_ns\": %.2f, \"direct_ns\": %.2f, \"hook_ns\": "
        "%.2f}\n",
        hooked, plain, hooked - plain);
}
