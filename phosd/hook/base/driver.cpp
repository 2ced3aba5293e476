#include "base/driver.h"

namespace phos {

Driver driver;

const char* error_name(CUresult result) {
    const char* name = nullptr;
    return driver.cuGetErrorName && driver.cuGetErrorName(result, &name) == CUDA_SUCCESS && name
               ? name
               : "an unknown error";
}

}  // namespace phos
