// What every part of the hook needs: whether it is at work in the process, and what it says of the
// process's fitness.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>

namespace phos {

extern std::atomic<bool> is_active;

// True from the first successful cuInit on, and never in a child that was forked after it.
inline bool active() {
    return __builtin_expect(is_active.load(std::memory_order_acquire), 1);
}

// False when PHOS_HOOK=off: then every call goes straight to the driver.
bool enabled();

// What the process uses that stands in the way. The first reason is kept.
void mark_not_parkable(const std::string& reason);  // mode `driver` still works
void mark_unsupported(const std::string& reason);   // no mode can save the process
struct Fitness {
    bool parkable;
    bool unsupported;
    std::string reason;
};
Fitness fitness();

uint64_t monotonic_ns();

// How long to wait for the engine's movers: `nanoseconds`, or as many milliseconds (10 to 60,000)
// as PHOS_TEST_PATIENCE says, so that tests need not wait as long. Whoever sets it shortens or
// lengthens the waits of their own program, and nothing else; a program of raised privileges does
// not read it.
uint64_t patience(uint64_t nanoseconds);
void read_test_patience();  // once, at the start

// Sleeps. No cancellation point, unlike nanosleep(): a thread of the program that is cancelled here
// would never let go of what the hook holds.
void pause_for(long nanoseconds);

// The program's errno is its own.
class KeepErrno {
  public:
    KeepErrno() : kept_(errno) {}
    ~KeepErrno() { errno = kept_; }

  private:
    int kept_;
};

}  // namespace phos
