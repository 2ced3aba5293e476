// The functions that this library has, by name and version (entry.def).
#pragma once

namespace phos::softgpu {

struct Lookup {
    void* function = nullptr;  // null: see `known`
    bool known = false;        // the name exists, but only for newer versions
};

// The newest form of `name` that `version` (as CUDA_VERSION) knows.
Lookup look_up(const char* name, int version, bool per_thread);

}  // namespace phos::softgpu
