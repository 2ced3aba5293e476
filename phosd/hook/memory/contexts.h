// Track the process's contexts: pending work, stream captures, and peer access.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/driver.h"

namespace phos::contexts {

enum class Activity { idle, unknown, busy, capturing };

// Returns whether any context has work, without waiting. The answer `idle` covers all work
// submitted before `epoch` last changed; `unknown`: all that was asked for is done, but more may
// have been submitted since. Contexts are not asked during a capture, which that would end.
Activity activity(uint64_t epoch);
// The same without asking the driver, as while the program's call is in it: a copy or a free
// that waits for the device keeps the driver from answering until it is done.
Activity known_activity();
// Since when (monotonic_ns()) work has been awaited that was submitted before activity() last asked
// a context; 0: for none. Asks by an event alone, which the driver answers whatever the program
// does (hazard 53), so it may be called while the program runs.
uint64_t unfinished_since();
uint32_t captures();
// Returns CUDA_SUCCESS if the calling thread may make calls that captures forbid, such as
// allocating and freeing. An error is the driver's answer to such a call, which has invalidated the
// captures.
CUresult capture_permits();
bool is_idle(CUcontext context);  // as the last call of activity() found it

bool current(CUcontext* context, int* device);  // of the calling thread; false if there is none
CUcontext any_on(int device);                   // null if the process has none there

// Waits for the current context as cuMemFree does, which does not affect stream captures.
CUresult synchronize();

// Releases and restores the stacks of kernels. They take up to half of a context's own memory,
// which the driver copies during the stop; nothing runs between the two calls, so none are needed.
void release_stacks();
void restore_stacks();

// Returns the other devices that may access plain memory of `device`.
std::vector<int> peers_of(int device);

// Called by the wrappers for what the program does.
void add(CUcontext context, bool primary);
bool forget(CUcontext context);    // one that may end now; false if it is unknown
CUcontext primary_on(int device);  // null if the process has none there
int device_of(CUcontext context);  // -1 if the driver does not tell
bool count_peer(int accessor, int owner, int change);  // true if access begins or ends with this

// Held while a capture begins, and while a context is asked. The two functions below need it.
extern std::mutex mutex;
void capture_began(CUstream stream, bool per_thread);
void capture_ended(CUstream stream, bool per_thread);

}  // namespace phos::contexts
