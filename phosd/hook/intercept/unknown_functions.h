// Driver functions that this hook does not know: they run unchanged, and their calls are noticed.
#pragma once

namespace phos {

// Returns a stand-in for `real`, found under `name`. At its first call it marks the process as not
// parkable; it waits while the gate is closed, and continues in `real` with all arguments
// untouched. A program that only looks the function up (the CUDA runtime looks up all) stays
// parkable. Null if there is no stand-in left.
void* stand_in(const char* name, void* real);

}  // namespace phos
