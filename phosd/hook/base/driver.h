// The real driver functions. cuda.h is read with every version of every function declared.
#pragma once

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

namespace phos {

struct Driver {
#define PHOS_WRITES(name, rule) decltype(&::name) name;
#define PHOS_GATED(name, why) decltype(&::name) name;
#define PHOS_OWN(name) decltype(&::name) name;
#define PHOS_ENTRY(name) decltype(&::name) name;
#define PHOS_USED(name) decltype(&::name) name;
#include "hooks.def"
};

// Filled once, before any wrapper is given out, and constant from then on; a function that this
// driver does not have is null.
extern Driver driver;

// Fills `driver` from the libcuda that is in the process (intercept/lookup.cpp). False while there
// is none.
bool load_driver();

// The name of an error, for texts.
const char* error_name(CUresult result);

// A CUDA context made current for a scope.
class Current {
  public:
    explicit Current(CUcontext context) : result_(driver.cuCtxPushCurrent_v2(context)) {}
    ~Current() {
        CUcontext popped;
        if (result_ == CUDA_SUCCESS) driver.cuCtxPopCurrent_v2(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    explicit operator bool() const { return result_ == CUDA_SUCCESS; }
    CUresult result() const { return result_; }

  private:
    const CUresult result_;
};

// The thread's capture mode relaxed for a scope, for the hook's own questions, which are none of
// the program's business: a capture does not forbid them, and they do not end it.
class RelaxedCapture {
  public:
    RelaxedCapture() { exchange(); }
    ~RelaxedCapture() { exchange(); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    void exchange() {
        if (driver.cuThreadExchangeStreamCaptureMode)
            driver.cuThreadExchangeStreamCaptureMode(&mode_);
    }
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace phos
