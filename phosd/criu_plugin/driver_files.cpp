// Loaded into CRIU as a plugin. Has `criu dump` save a process that has the GPU driver's devices
// open or mapped; and has phosd called at the points where the driver can work (restore_threads.h).
//
// A process that was forked from one that uses CUDA has inherited them and cannot use them: CUDA
// forbids it. Plain CRIU refuses such a process. Here it learns to note the mappings, without their
// contents, and the descriptors; phosd then writes into the image what they are to be after a
// restore (phosd/engine/criu/images/inert_devices.py), so that the restore needs no plugin. It is
// also phosd that decides for which processes this is right, while CRIU holds them (preflight.py).
//
// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>

#include "criu_abi.h"
#include "driver_devices.h"
#include "restore_threads.h"

namespace {

using phos::criu::Plugin;

bool of_driver(const struct stat& file) {
    return phos::criu::is_one_of(std::getenv("PHOS_DRIVER_DEVICES"), file);
}

int handle_mapping(int, const struct stat* file) {
    return of_driver(*file) ? 0 : -ENOTSUP;
}

int dump_file(int descriptor, int) {
    struct stat file;
    if (fstat(descriptor, &file) != 0) return -errno;
    return of_driver(file) ? 0 : -ENOTSUP;
}

int resume_late(int) {
    phos::criu::resume_devices(true);
    return 0;
}

int init(int) {
    phos::criu::connect();
    return 0;
}

// At the end of a dump all tasks are still held.
void end(int stage, int result) {
    if (stage == phos::criu::kDump) phos::criu::resume_devices(result == 0);
}

template <typename Function>
void* hook(Function* function) {
    return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) Plugin CR_PLUGIN_DESC = {
    "phos",
    init,
    end,
    phos::criu::kVersion,
    phos::criu::kHooks,
    {nullptr, nullptr, hook(dump_file), nullptr, nullptr, nullptr, nullptr, hook(handle_mapping),
     nullptr, hook(resume_late), nullptr, hook(phos::criu::checkpoint_devices)},
};
}
