// The process's contexts: whether anything runs in them, captures under way, and peer access.
#pragma once

#include <vector>

#include "driver.h"

namespace phos::contexts {

enum class Activity { idle, busy, capturing };

// Whether any context has work, without ever waiting for it. An answer `idle` speaks for all work
// submitted before `epoch` last changed. Contexts are left alone during a capture: asking them
// would end it.
Activity activity(uint64_t epoch);
uint32_t captures();
bool is_idle(CUcontext context);  // as the last call of activity() found it

bool current(CUcontext* context, int* device);  // of the calling thread; false when there is none
CUcontext any_on(int device);                   // null when the process has none there

// Devices that may access the plain memory of `device`, beside itself.
std::vector<int> peers_of(int device);

}  // namespace phos::contexts
