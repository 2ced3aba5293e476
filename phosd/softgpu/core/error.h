// How a driver call fails inside the library: it throws, and the exported function returns the
// code.
#pragma once

#include <cuda.h>

#include <string>

namespace phos::softgpu {

struct Error {
    CUresult code;
};

[[noreturn]] inline void fail(CUresult code) {
    throw Error{code};
}

inline void require(bool condition, CUresult code = CUDA_ERROR_INVALID_VALUE) {
    if (!condition) throw Error{code};
}

// Tells the user why a call failed, where the CUresult alone would not (PHOS_SOFTGPU_LOG).
void explain(const std::string& text);

}  // namespace phos::softgpu
