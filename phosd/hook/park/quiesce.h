// Quiesce a running process behind its closed gate.
#pragma once

#include <mutex>

#include "protocol/wire.h"

namespace phos::quiesce {

// Held while working on the gate: by the hook's thread for a client's request, by a thread of the
// program for a Stop.
extern std::mutex turn;

// Call it when the gate has begun to close.
void begin();

// Continues quiescing for at most a few milliseconds, and returns the state. The gate must be
// closing or closed. Never waits for a device: the work that the device waits for may be held at
// the gate.
wire::GateState advance(uint64_t slice_ns, uint32_t for_peers);

// Quiesces the process for its lifetime, on a thread of the program that is in no gated call. False
// if that took longer than the deadline; the program then runs on. Waits while a client holds the
// gate.
class Stop {
  public:
    explicit Stop(uint32_t deadline_ms);
    ~Stop();
    Stop(const Stop&) = delete;
    Stop& operator=(const Stop&) = delete;
    explicit operator bool() const { return settled_; }

  private:
    std::unique_lock<std::mutex> turn_;
    bool settled_ = false;
};

}  // namespace phos::quiesce
