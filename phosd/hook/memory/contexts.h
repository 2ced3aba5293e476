// The process's contexts: whether anything runs in them, captures under way, and peer access.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/driver.h"

namespace phos::contexts {

enum class Activity { idle, busy, capturing };

// Whether any context has work, without ever waiting for it. An answer `idle` speaks for all work
// submitted before `epoch` last changed. Contexts are left alone during a capture: asking them
// would end it.
Activity activity(uint64_t epoch);
uint32_t captures();
// Whether the calling thread may make calls that captures forbid, as allocating and freeing are:
// CUDA_SUCCESS when it may. An error is the driver's answer to such a call, and has ended the
// captures as that does.
CUresult capture_permits();
bool is_idle(CUcontext context);  // as the last call of activity() found it

bool current(CUcontext* context, int* device);  // of the calling thread; false when there is none
CUcontext any_on(int device);                   // null when the process has none there

// Waits for the current context as cuMemFree does, which leaves stream captures alone.
CUresult synchronize();

// The stacks of a context's kernels take up to half of what the context owns, and the driver copies
// them while the process stands still. Nothing runs between these two calls, so none are needed.
void release_stacks();
void restore_stacks();

// Devices that may access the plain memory of `device`, beside itself.
std::vector<int> peers_of(int device);

// What the program does, as its wrappers tell.
void add(CUcontext context, bool primary);
bool forget(CUcontext context);    // one that may end now; false when it is not known
CUcontext primary_on(int device);  // null when the process has none there
int device_of(CUcontext context);  // -1 when the driver does not tell
bool count_peer(int accessor, int owner, int change);  // true when it may now, or may no more

// A capture begins, and a context is asked, only under this. The two below need it.
extern std::mutex mutex;
void capture_began(CUstream stream, bool per_thread);
void capture_ended(CUstream stream, bool per_thread);

}  // namespace phos::contexts
