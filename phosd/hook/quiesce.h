// Bringing a running process to rest behind its closed gate.
#pragma once

#include "wire.h"

namespace phos::quiesce {

// The gate has begun to close.
void begin();

// Works on it for a few milliseconds at most and says how far it is. The gate must be closing or
// closed. Never waits for a device: what the device waits for may be held at the gate.
wire::GateState advance(bool peers_busy);

}  // namespace phos::quiesce
