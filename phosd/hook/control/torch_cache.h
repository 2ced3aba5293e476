// The memory that PyTorch's caching allocator keeps and no tensor has, given back on request: the
// program's own interpreter is asked to call torch.cuda.empty_cache().
#pragma once

#include "protocol/wire.h"

namespace phos::torch_cache {

// Looks for CPython in the process, once, on a thread of the program's: a lookup waits for the
// loader's lock, which the program may hold for as long as it likes. An interpreter that comes
// later is not found.
void find_interpreter();

// Asks for the release, or joins the one that is still asked for. Never waits: the program's main
// thread makes the call when it next comes to it.
wire::ReleaseState release();

// What became of the one that was asked for last.
wire::ReleaseState state();

}  // namespace phos::torch_cache
