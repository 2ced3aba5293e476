// Functions of the driver's library that the software GPU's NVML calls.
#include "core/error.h"
#include "core/runtime.h"

using namespace phos::softgpu;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Opens the device, as NVML does. Returns what cuInit would answer.
EXPORTED int phos_softgpu_nvml_open() {
    try {
        Runtime& found = runtime_for_nvml();
        found.file_of_nvml().take(found.config().device_file);
    } catch (const Error& error) {
        return error.code;
    }
    return CUDA_SUCCESS;
}

EXPORTED void phos_softgpu_nvml_close() {
    runtime_for_nvml().file_of_nvml().give_up();
}

EXPORTED int phos_softgpu_nvml_count(unsigned* count) {
    Runtime& found = runtime_for_nvml();
    if (!found.file_of_nvml().taken()) return CUDA_ERROR_NOT_INITIALIZED;
    *count = static_cast<unsigned>(found.device_count());
    return CUDA_SUCCESS;
}
