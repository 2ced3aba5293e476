// Legacy CUDA IPC.
#include "ipc.h"

#include "gate.h"
#include "hook.h"
#include "own.h"

namespace phos {

CUresult own::cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    const gate::Pass pass;
    const CUresult result = driver.cuIpcGetMemHandle(handle, address);
    if (result == CUDA_SUCCESS) mark_unsupported("the program shares memory by legacy CUDA IPC");
    return result;
}

CUresult own::cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    const gate::Pass pass;
    const CUresult result = driver.cuIpcOpenMemHandle_v2(address, handle, flags);
    if (result == CUDA_SUCCESS) mark_unsupported("the program shares memory by legacy CUDA IPC");
    return result;
}

CUresult own::cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    return own::cuIpcOpenMemHandle_v2(address, handle, flags);
}

CUresult own::cuIpcCloseMemHandle(CUdeviceptr address) {
    const gate::Pass pass;
    return driver.cuIpcCloseMemHandle(address);
}

}  // namespace phos

namespace phos::ipc {

int listener() {
    return -1;
}
void serve() {}
void detach() {}
void attach() {}

}  // namespace phos::ipc
