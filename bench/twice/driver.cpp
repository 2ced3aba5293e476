#include "driver.h"

#include <dlfcn.h>

namespace twice {

Driver driver;
thread_local bool OwnCalls::active_ = false;

void Driver::load() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!library_) library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library_) throw Failed("dlopen", dlerror());
#define TWICE_FIND(name)                                  \
    name = reinterpret_cast<decltype(name)>(find(#name)); \
    if (!name) throw Failed("dlsym", std::string("libcuda has no function ") + #name);
    TWICE_DRIVER(TWICE_FIND)
#undef TWICE_FIND
}

void* Driver::find(const char* name) const {
    return dlsym(library_, name);
}

void require(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    if (driver.cuGetErrorName(result, &text) != CUDA_SUCCESS || !text) text = "an unknown error";
    throw Failed(call, text);
}

}  // namespace twice
