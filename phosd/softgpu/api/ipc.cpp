// Legacy CUDA IPC: not supported, and said so. A hooked program's calls are answered by the hook.
#include "api/api.h"

using namespace phos::softgpu;

API(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr address), (handle, address)) {
    require(handle && address);
    fail(CUDA_ERROR_NOT_SUPPORTED);
}

API(cuIpcOpenMemHandle_v2, (CUdeviceptr * address, CUipcMemHandle, unsigned), (address, {}, 0)) {
    require(address);
    fail(CUDA_ERROR_NOT_SUPPORTED);
}

API(cuIpcCloseMemHandle, (CUdeviceptr address), (address)) {
    require(address);
    fail(CUDA_ERROR_NOT_SUPPORTED);
}

API(cuIpcGetEventHandle, (CUipcEventHandle * handle, CUevent event), (handle, event)) {
    require(handle && event);
    fail(CUDA_ERROR_NOT_SUPPORTED);
}

API(cuIpcOpenEventHandle, (CUevent * event, CUipcEventHandle), (event, {})) {
    require(event);
    fail(CUDA_ERROR_NOT_SUPPORTED);
}
