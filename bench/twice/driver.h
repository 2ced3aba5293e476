// The driver's functions, as libcuda has them.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

namespace twice {

#define TWICE_DRIVER(FUNCTION)        \
    FUNCTION(cuCtxGetCurrent)         \
    FUNCTION(cuCtxSynchronize)        \
    FUNCTION(cuFuncGetModule)         \
    FUNCTION(cuFuncGetName)           \
    FUNCTION(cuFuncGetParamInfo)      \
    FUNCTION(cuGetErrorName)          \
    FUNCTION(cuKernelGetLibrary)      \
    FUNCTION(cuKernelGetName)         \
    FUNCTION(cuKernelGetParamInfo)    \
    FUNCTION(cuLaunchKernel)          \
    FUNCTION(cuMemAlloc_v2)           \
    FUNCTION(cuMemGetAddressRange_v2) \
    FUNCTION(cuMemGetInfo_v2)         \
    FUNCTION(cuMemcpyDtoDAsync_v2)    \
    FUNCTION(cuMemcpyDtoH_v2)         \
    FUNCTION(cuMemsetD32_v2)          \
    FUNCTION(cuModuleGetFunction)     \
    FUNCTION(cuModuleLoadData)

struct Driver {
#define TWICE_MEMBER(name) decltype(&::name) name = nullptr;
    TWICE_DRIVER(TWICE_MEMBER)
#undef TWICE_MEMBER

    // Finds the functions in the libcuda of this process. Throws Failed.
    void load();
    // Returns a function by its name, null if there is none.
    void* find(const char* name) const;

  private:
    void* library_ = nullptr;
};

extern Driver driver;

// A call that has failed: its name, and what it says.
struct Failed : std::runtime_error {
    Failed(const char* call, const std::string& says) : std::runtime_error(says), call(call) {}
    const char* call;
};

void require(CUresult result, const char* call);
#define TWICE_CALL(name, ...) ::twice::require(::twice::driver.name(__VA_ARGS__), #name)

// While one lives, what its thread calls is our own, and not the program's.
class OwnCalls {
  public:
    OwnCalls() : before_(active_) { active_ = true; }
    ~OwnCalls() { active_ = before_; }
    OwnCalls(const OwnCalls&) = delete;
    OwnCalls& operator=(const OwnCalls&) = delete;
    static bool active() { return active_; }

  private:
    static thread_local bool active_;
    bool before_;
};

}  // namespace twice
