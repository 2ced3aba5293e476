// Start the hook, and disable it in a forked child.
#include <pthread.h>

#include "base/descriptors.h"
#include "base/driver.h"
#include "base/faults.h"
#include "base/overrides.h"
#include "base/process.h"
#include "control/hello.h"
#include "control/server.h"
#include "control/torch_cache.h"
#include "cow/session.h"
#include "gate/gate.h"

// Registers the library's destructors here instead of with libc, so that none run: threads of the
// hook and the program may still use the hook's objects while exit() runs destructors.
extern "C" __attribute__((visibility("hidden"))) int __cxa_atexit(void (*)(void*), void*, void*) {
    return 0;
}

namespace phos {
namespace {

// Disables the hook in a forked child, which shares descriptors with its parent and nothing else.
void become_inert() {
    if (!is_active.exchange(false)) return;
    gate::abandon();
    cow::abandon();
    descriptors::close_all_in_child();
}

bool driver_is_complete() {
    const void* const needed[] = {
#define PHOS_NEED(name) reinterpret_cast<const void*>(driver.name)
        PHOS_NEED(cuMemCreate),
        PHOS_NEED(cuMemRelease),
        PHOS_NEED(cuMemMap),
        PHOS_NEED(cuMemUnmap),
        PHOS_NEED(cuMemSetAccess),
        PHOS_NEED(cuMemAddressReserve),
        PHOS_NEED(cuMemAddressFree),
        PHOS_NEED(cuMemExportToShareableHandle),
        PHOS_NEED(cuCtxGetCurrent),
        PHOS_NEED(cuMemImportFromShareableHandle),
        PHOS_NEED(cuCtxGetDevice),
        PHOS_NEED(cuCtxPushCurrent_v2),
        PHOS_NEED(cuEventCreate),
        PHOS_NEED(cuCtxPopCurrent_v2),
        PHOS_NEED(cuEventQuery),
        PHOS_NEED(cuMemGetAllocationGranularity),
        PHOS_NEED(cuCtxSynchronize),
        PHOS_NEED(cuDeviceGetAttribute),
        PHOS_NEED(cuEventDestroy_v2),
        PHOS_NEED(cuDevicePrimaryCtxGetState),
        PHOS_NEED(cuMemcpyDtoD_v2),
        PHOS_NEED(cuMemGetAllocationPropertiesFromHandle)
#undef PHOS_NEED
    };
    for (const void* function : needed)
        if (!function) return false;
    return true;
}

// Activates the hook. Called after a successful cuInit.
void start() {
    static const bool started = [] {
        if (!enabled() || !driver_is_complete()) return false;
        if (!driver.cuCtxRecordEvent)
            mark_not_parkable(Reason::old_driver,
                              "the driver has no cuCtxRecordEvent; it is too old to be parked");
        if (!gate::closable())
            mark_not_parkable(Reason::no_membarrier,
                              "the kernel or a seccomp filter refuses membarrier(2), without which "
                              "calls under way cannot be told from calls to come");
        note_first_devices();
        faults::load();
        read_test_patience();
        torch_cache::find_interpreter();
        if (pthread_atfork(nullptr, nullptr, become_inert) != 0) return false;
        is_active.store(true, std::memory_order_release);
        control::start();
        return true;
    }();
    static_cast<void>(started);
}

}  // namespace

CUresult overrides::cuInit(unsigned int flags) {
    const CUresult result = driver.cuInit(flags);
    if (result == CUDA_SUCCESS) start();
    return result;
}

}  // namespace phos
