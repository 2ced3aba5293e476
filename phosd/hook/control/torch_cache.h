// Ask PyTorch to free the memory that its caching allocator holds and no tensor uses: the
// program's own interpreter is asked to call torch.cuda.empty_cache().
#pragma once

#include "protocol/wire.h"

namespace phos::torch_cache {

// Looks for CPython in the process, once, on a thread of the program: a lookup waits for the
// loader's lock, which the program may hold for any time. An interpreter loaded later is not found.
void find_interpreter();

// Requests the release, or joins a pending request. Never waits: the program's main thread makes
// the call when it next checks for pending calls.
wire::ReleaseState release();

// Returns the state of the last request.
wire::ReleaseState state();

}  // namespace phos::torch_cache
