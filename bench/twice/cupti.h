// What of CUPTI's callback interface is used here, as cupti_callbacks.h declares it. It has not
// changed since CUDA 4.1, and the headers are not on every machine that has the library.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace twice {

constexpr uint32_t kDriverApi = 1;  // CUPTI_CB_DOMAIN_DRIVER_API
constexpr int kEnter = 0;           // CUPTI_API_ENTER
constexpr int kExit = 1;            // CUPTI_API_EXIT

// CUpti_CallbackData.
struct CallbackData {
    int site;
    const char* function_name;
    const void* parameters;  // of the call: its arguments, as a struct
    void* return_value;      // at the exit: a CUresult
    const char* symbol_name;
    CUcontext context;
    uint32_t context_id;
    uint64_t* correlation_data;
    uint32_t correlation_id;
};

using Subscriber = struct OpaqueSubscriber*;
using Callback = void (*)(void* user, uint32_t domain, uint32_t call, const void* data);

struct Cupti {
    int (*subscribe)(Subscriber* subscriber, Callback callback, void* user);
    int (*enable)(uint32_t enable, Subscriber subscriber, uint32_t domain, uint32_t call);
    int (*name_of)(uint32_t domain, uint32_t call, const char** name);
    int (*text_of)(int result, const char** text);
};

// The arguments of calls, as generated_cuda_meta.h has them; calls that begin alike are one here.
struct LaunchKernel {  // cuLaunchKernel, and cuLaunchCooperativeKernel without `extra`
    CUfunction function;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    CUstream stream;
    void** parameters;
    void** extra;
};
struct LaunchKernelEx {
    const CUlaunchConfig* configuration;
    CUfunction function;
    void** parameters;
    void** extra;
};
struct MemAlloc {  // cuMemAlloc, cuMemAllocAsync, cuMemAllocFromPoolAsync
    CUdeviceptr* address;
    size_t bytes;
};
struct MemAllocPitch {
    CUdeviceptr* address;
    size_t* pitch;
    size_t width;
    size_t height;
};
struct MemFree {  // cuMemFree, cuMemFreeAsync
    CUdeviceptr address;
};
struct MemSpan {  // cuMemSetAccess, cuMemUnmap
    CUdeviceptr address;
    size_t bytes;
};

struct Load {  // cuModuleLoad..., cuLibraryLoad...
    void** handle;
    const void* image;  // or the path of a file
};
struct Unload {  // cuModuleUnload, cuLibraryUnload
    const void* handle;
};
struct GetFunction {  // cuKernelGetFunction
    CUfunction* function;
    CUkernel kernel;
};

}  // namespace twice
