// NVML for the software GPU: it tells how many GPUs there are, and asks the driver's library. NVML
// of driver 580 loads libcuda, by which the driver's checkpoint knows the process: it takes NVML's
// devices away and brings them back (H200, 580.159).
#include <dlfcn.h>

#include <mutex>

namespace {

// As in nvml.h.
enum Result : int { success = 0, uninitialized = 1, library_not_found = 12, unknown = 999 };

struct Driver {
    int (*open)() = nullptr;
    void (*close)() = nullptr;
    int (*count)(unsigned*) = nullptr;
};

std::mutex g_mutex;
unsigned g_users = 0;

bool load(Driver* driver) {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) return false;
    driver->open = reinterpret_cast<int (*)()>(dlsym(library, "phos_softgpu_nvml_open"));
    driver->close = reinterpret_cast<void (*)()>(dlsym(library, "phos_softgpu_nvml_close"));
    driver->count = reinterpret_cast<int (*)(unsigned*)>(dlsym(library, "phos_softgpu_nvml_count"));
    return driver->open && driver->close && driver->count;
}

const Driver* driver() {
    static Driver found;
    static const bool loaded = load(&found);
    return loaded ? &found : nullptr;
}

}  // namespace

#define NVML_API extern "C" __attribute__((visibility("default")))

NVML_API int nvmlInit_v2() {
    const std::lock_guard lock(g_mutex);
    if (!driver()) return library_not_found;
    if (g_users == 0 && driver()->open() != 0) return unknown;
    ++g_users;
    return success;
}

NVML_API int nvmlShutdown() {
    const std::lock_guard lock(g_mutex);
    if (g_users == 0) return uninitialized;
    if (--g_users == 0) driver()->close();
    return success;
}

NVML_API int nvmlDeviceGetCount_v2(unsigned* count) {
    const std::lock_guard lock(g_mutex);
    if (g_users == 0) return uninitialized;
    return driver()->count(count) == 0 ? success : unknown;
}
