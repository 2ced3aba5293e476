// A CUPTI that calls back about what a test has this library call of the driver.
#include <dlfcn.h>

#include <iterator>

#include "cupti.h"

using namespace twice;

namespace {

const char* const kNames[] = {"",
                              "cuModuleLoadData",
                              "cuMemAlloc_v2",
                              "cuMemFree_v2",
                              "cuLaunchKernel",
                              "cuLaunchKernelEx",
                              "cuStreamBeginCapture_v2",
                              "cuStreamEndCapture",
                              "cuDeviceGetCount"};
enum Number : uint32_t { load = 1, allocate, free_, launch, launch_ex, begin, end };

Callback callback = nullptr;
bool enabled[std::size(kNames)] = {};

template <class Function>
Function* real(const char* name) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<Function*>(dlsym(library, name));
}

void call_back(Number number, int site, const void* parameters, CUresult* result) {
    CallbackData data{};
    data.site = site;
    data.function_name = kNames[number];
    data.parameters = parameters;
    data.return_value = result;
    if (callback && enabled[number]) callback(nullptr, kDriverApi, number, &data);
}

template <class Parameters, class Call>
CUresult traced(Number number, const Parameters& parameters, Call call) {
    CUresult result = CUDA_SUCCESS;
    call_back(number, kEnter, &parameters, &result);
    result = call();
    call_back(number, kExit, &parameters, &result);
    return result;
}

}  // namespace

extern "C" {

int cuptiSubscribe(Subscriber*, Callback given, void*) {
    callback = given;
    return 0;
}
int cuptiEnableCallback(uint32_t enable, Subscriber, uint32_t, uint32_t number) {
    enabled[number] = enable;
    return 0;
}
int cuptiGetCallbackName(uint32_t, uint32_t number, const char** name) {
    if (number >= std::size(kNames)) return 1;
    *name = kNames[number];
    return 0;
}
int cuptiGetResultString(int, const char** text) {
    *text = "CUPTI_ERROR_UNKNOWN";
    return 0;
}

CUresult fake_load(CUmodule* module, const void* image) {
    return traced(load, Load{reinterpret_cast<void**>(module), image}, [&] {
        return real<decltype(cuModuleLoadData)>("cuModuleLoadData")(module, image);
    });
}
CUresult fake_allocate(CUdeviceptr* address, size_t bytes) {
    return traced(allocate, MemAlloc{address, bytes},
                  [&] { return real<decltype(cuMemAlloc_v2)>("cuMemAlloc_v2")(address, bytes); });
}
CUresult fake_free(CUdeviceptr address) {
    return traced(free_, MemFree{address},
                  [&] { return real<decltype(cuMemFree_v2)>("cuMemFree_v2")(address); });
}
CUresult fake_launch(CUfunction function, unsigned blocks, unsigned threads, void** parameters) {
    const LaunchKernel given{function, {blocks, 1, 1}, {threads, 1, 1}, 0,
                             nullptr,  parameters,     nullptr};
    return traced(launch, given, [&] {
        return real<decltype(cuLaunchKernel)>("cuLaunchKernel")(function, blocks, 1, 1, threads, 1,
                                                                1, 0, nullptr, parameters, nullptr);
    });
}
CUresult fake_launch_ex(CUfunction function, unsigned blocks, unsigned threads, void** parameters) {
    CUlaunchConfig shape{};
    shape.gridDimX = blocks;
    shape.blockDimX = threads;
    shape.gridDimY = shape.gridDimZ = shape.blockDimY = shape.blockDimZ = 1;
    return traced(launch_ex, LaunchKernelEx{&shape, function, parameters, nullptr}, [&] {
        return real<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx")(&shape, function, parameters,
                                                                    nullptr);
    });
}
void fake_capture(int begins) {
    traced(begins ? begin : end, 0, [] { return CUDA_SUCCESS; });
}

}  // extern "C"
