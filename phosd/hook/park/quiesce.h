// Bringing a running process to rest behind its closed gate.
#pragma once

#include <mutex>

#include "protocol/wire.h"

namespace phos::quiesce {

// Held by whoever works on the gate: the hook's thread for a request of a client, a thread of the
// program for a Stop.
extern std::mutex turn;

// The gate has begun to close.
void begin();

// Works on it for a few milliseconds at most and says how far it is. The gate must be closing or
// closed. Never waits for a device: what the device waits for may be held at the gate.
wire::GateState advance(bool peers_busy);

// Brings the process to rest for as long as it lives, on a thread of the program that is in no
// gated call. False when that took longer than the deadline; then the program runs on. Waits while
// a client holds the gate.
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
