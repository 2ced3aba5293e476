// What CRIU and a plugin know of each other: a descriptor that CRIU looks up under the name
// CR_PLUGIN_DESC, with functions for its hooks by number. Declared here, since few distributions
// ship CRIU's header. This is plugin version 0.2, which CRIU 2.0 and newer have; the last hook is
// CRIU 4.0's.
#pragma once

namespace phos::criu {

enum Hook : unsigned {
    kDumpExternalFile = 2,     // int (int fd, int id)
    kHandleDeviceMapping = 7,  // int (int fd, const struct stat*)
    kResumeDevicesLate = 9,    // int (int pid), of a restore: each task is held
    kPauseDevices = 10,        // int (int pid), of a dump: the task is about to be held
    kCheckpointDevices = 11,   // int (int pid), of a dump: all tasks are held
};

// What `init` and `exit` are called for.
enum Stage { kDump = 0, kPreDump = 1, kRestore = 2 };

// CRIU refuses a plugin that has more hooks than it knows itself, so no more than are used.
constexpr unsigned kHooks = kCheckpointDevices + 1;
constexpr unsigned kVersion = 2 << 8;  // 0.2.0: 8 bits each

struct Plugin {
    const char* name;
    int (*init)(int stage);
    void (*exit)(int stage, int result);
    unsigned version;
    unsigned hook_count;
    void* hooks[kHooks];
};

}  // namespace phos::criu
