// State shared by all parts of the hook: whether it is active in the process, and whether the
// process can be parked or saved.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>

namespace phos {

extern std::atomic<bool> is_active;

// True from the first successful cuInit on; never in a child that was forked after it.
inline bool active() {
    return __builtin_expect(is_active.load(std::memory_order_acquire), 1);
}

// Returns false if PHOS_HOOK=off: every call then goes directly to the driver.
bool enabled();

enum class Reason {
#define PHOS_REASON(name, code) name,
#include "reasons.def"
#undef PHOS_REASON
};
const char* code_of(Reason reason);

// Records what the process uses that cannot be parked or saved. The first reason is kept.
void mark_not_parkable(Reason code, const std::string& reason);  // mode `driver` still works
void mark_unsupported(Reason code, const std::string& reason);   // no mode can save the process
struct Fitness {
    bool parkable;
    bool unsupported;
    std::string reason;
    const char* code;
};
Fitness fitness();

// Returns the start time of a process in clock ticks since boot; 0 if it has ended or is a zombie.
uint64_t began(int pid);

uint64_t monotonic_ns();

// Returns how long to wait for the engine's movers: `nanoseconds`, or the milliseconds (10 to
// 60,000) of PHOS_TEST_PATIENCE, for tests. The variable changes only the waits of the program that
// it is set for, and is ignored if the program has raised privileges.
uint64_t patience(uint64_t nanoseconds);
void read_test_patience();  // once, at the start

// Sleeps, without being a cancellation point like nanosleep(): a thread of the program that is
// cancelled here would never release what the hook holds.
void pause_for(long nanoseconds);

// Restores the program's errno at the end of a scope.
class KeepErrno {
  public:
    KeepErrno() : kept_(errno) {}
    ~KeepErrno() { errno = kept_; }

  private:
    int kept_;
};

}  // namespace phos
