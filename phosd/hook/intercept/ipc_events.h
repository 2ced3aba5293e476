// Interprocess events, without the driver's: to the driver such an event is a plain one, and words
// that the processes share tell the others what was recorded and whether it is reached.
#pragma once

#include "base/driver.h"

namespace phos::ipc_events {

// As the driver's cuEventSynchronize, for every event.
CUresult synchronize(CUevent event);

}  // namespace phos::ipc_events
