// Access the real driver functions. cuda.h is included with all versions of all functions declared.
#pragma once

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

namespace phos {

struct Driver {
#define PHOS_WRITES(name, rule) decltype(&::name) name;
#define PHOS_GATED(name, why) decltype(&::name) name;
#define PHOS_OWN(name) decltype(&::name) name;
#define PHOS_ENTRY(name) decltype(&::name) name;
#define PHOS_ASKS(name, what) decltype(&::name) name;
#define PHOS_USED(name) decltype(&::name) name;
#include "hooks.def"
};

// Filled once, before any wrapper is handed out, and constant from then on. Null for functions that
// this driver does not have.
extern Driver driver;

// Fills `driver` from the libcuda in the process (intercept/lookup.cpp). Returns false if there is
// none.
bool load_driver();

// Returns the name of an error, for messages.
const char* error_name(CUresult result);

// Makes a CUDA context current for a scope.
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

// Relaxes the thread's capture mode for a scope, so that the hook's own calls are allowed during
// the program's stream captures, and do not end them.
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
