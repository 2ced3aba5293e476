// The hook's beginning, its end in a forked child, and what it says of the process's fitness.
#include "hook.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>

#include "control.h"
#include "cow.h"
#include "descriptors.h"
#include "driver.h"
#include "faults.h"
#include "gate.h"
#include "log.h"
#include "own.h"
#include "torch_cache.h"

// The hook's threads, and the program's, may be at work in the hook while exit() runs destructors:
// so what the hook holds has none that run. The library's objects are registered here and not with
// libc.
extern "C" __attribute__((visibility("hidden"))) int __cxa_atexit(void (*)(void*), void*, void*) {
    return 0;
}

namespace phos {

std::atomic<bool> is_active{false};

namespace {

std::mutex fitness_mutex;
Fitness fitness_now{true, false, {}};

void mark(bool unsupported, const std::string& reason) {
    const std::lock_guard lock(fitness_mutex);
    if (unsupported ? fitness_now.unsupported : !fitness_now.parkable) return;
    log::note("%s: %s", unsupported ? "unsupported" : "not parkable", reason.c_str());
    // What no mode can save outweighs what only parking cannot.
    if (unsupported || fitness_now.reason.empty()) fitness_now.reason = reason;
    fitness_now.unsupported |= unsupported;
    fitness_now.parkable = false;
}

// The child shares descriptors with its parent, and nothing else of the hook works in it.
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

}  // namespace

bool enabled() {
    static const bool on = [] {
        const char* value = std::getenv("PHOS_HOOK");
        return !value || std::strcmp(value, "off") != 0;
    }();
    return on;
}

void start() {
    static const bool started = [] {
        if (!enabled() || !driver_is_complete()) return false;
        if (!driver.cuCtxRecordEvent)
            mark_not_parkable("the driver has no cuCtxRecordEvent; it is too old to be parked");
        if (!gate::closable())
            mark_not_parkable(
                "the kernel or a seccomp filter refuses membarrier(2), without which "
                "calls under way cannot be told from calls to come");
        faults::load();
        torch_cache::find_interpreter();
        if (pthread_atfork(nullptr, nullptr, become_inert) != 0) return false;
        is_active.store(true, std::memory_order_release);
        control::start();
        return true;
    }();
    static_cast<void>(started);
}

void mark_not_parkable(const std::string& reason) {
    mark(false, reason);
}
void mark_unsupported(const std::string& reason) {
    mark(true, reason);
}

Fitness fitness() {
    const std::lock_guard lock(fitness_mutex);
    return fitness_now;
}

uint64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

void pause_for(long nanoseconds) {
    const KeepErrno keep;
    const timespec time{0, nanoseconds};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &time, nullptr);
}

CUresult own::cuInit(unsigned int flags) {
    const CUresult result = driver.cuInit(flags);
    if (result == CUDA_SUCCESS) start();
    return result;
}

}  // namespace phos
