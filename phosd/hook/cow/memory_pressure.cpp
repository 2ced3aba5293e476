#include "cow/memory_pressure.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/process.h"
#include "cow/session.h"
#include "memory/contexts.h"

namespace phos {

using board::kGiveUp;

namespace {

constexpr uint64_t kPatience = 3'000'000'000;  // nanoseconds of one level
constexpr long kPause = 500'000;
constexpr unsigned kTries = 10;  // after the job has given up, until its movers release memory

std::mutex turn;  // one thread asks at a time

// Waits until the condition, called as a reader of the session, is true; false at the deadline. The
// session may end meanwhile, which frees all that it holds.
template <class Condition>
bool wait_until(Condition condition) {
    for (const uint64_t end = monotonic_ns() + patience(kPatience); monotonic_ns() < end;) {
        {
            const cow::Reader session;
            if (!session || condition(*session)) return true;
        }
        pause_for(kPause);
    }
    return false;
}

bool frees_taken(const cow::Session& session) {
    const board::Header& header = *session.board.header;
    return header.freed_taken.load(std::memory_order_acquire) >=
           header.freed_posted.load(std::memory_order_relaxed);
}

}  // namespace

MemoryPressure::~MemoryPressure() {
    if (!level_) return;
    const cow::Reader session;
    if (!session) return;
    board::Pressure& pressure = session->board.header->pressure[device_];
    pressure.wanted.store(0, std::memory_order_relaxed);
    pressure.given.store(0, std::memory_order_release);
}

bool MemoryPressure::step() {
    if (device_ < 0 || device_ >= static_cast<int>(board::kMaxDevices)) return false;
    if (level_ == kGiveUp) {
        if (!tries_) return false;
        --tries_;
    } else if (!could_help()) {
        // Try once more: memory may have been freed since the attempt.
        return !std::exchange(looked_, true);
    }
    // It may have been freed since the attempt.
    if (!std::exchange(tried_again_, true) && held() && free_memory() >= size_) return true;
    lock_.unlock();
    bool again = true;
    {
        const std::lock_guard mine(turn);
        const RelaxedCapture relaxed;
        if (level_ == kGiveUp)
            pause_for(100 * kPause);
        else if (cow::armed.load() || held())
            press(++level_);
        else
            again = wait_for_frees();
    }
    lock_.lock();
    return again;
}

// Returns whether the allocation would succeed if the job freed everything.
bool MemoryPressure::could_help() const {
    uint64_t kept = held();
    {
        const cow::Reader session;
        if (!session) return false;
        if (const auto& shadows = session->shadows[device_]) {
            const std::lock_guard lock(shadows->mutex);
            kept += shadows->bytes();
        }
        // While armed, the movers keep even blocks that the engine has released.
        if (cow::armed.load() || !frees_taken(*session))
            kept += session->freed_bytes[device_].load();
    }
    if (!kept) return false;
    const std::optional<uint64_t> free = free_memory();
    return !free || size_ <= *free + kept;
}

// Returns the bytes that the engine holds and will free on its own.
uint64_t MemoryPressure::held() const {
    const cow::Reader session;
    return session ? session->board.header->held[device_].load(std::memory_order_acquire) : 0;
}

std::optional<uint64_t> MemoryPressure::free_memory() const {
    const CUcontext context = contexts::any_on(device_);
    const Current current(context);
    size_t free = 0;
    size_t total = 0;
    if (!context || !current || driver.cuMemGetInfo_v2(&free, &total) != CUDA_SUCCESS) return {};
    return free;
}

void MemoryPressure::press(uint32_t level) {
    if (level == kGiveUp) tries_ = kTries;
    const bool comes_by_itself = held() != 0;
    const uint64_t free_before = free_memory().value_or(UINT64_MAX);
    {
        const cow::Reader session;
        if (!session) return;
        board::Header& header = *session->board.header;
        if (const auto& shadows = session->shadows[device_]) {
            const std::lock_guard lock(shadows->mutex);
            shadows->release_free_slabs();
        }
        header.pressure[device_].wanted.store(level, std::memory_order_release);
        if (level < kGiveUp) session->board.post();
    }
    if (level == kGiveUp) {
        cow::give_up("the program needs the memory that the job holds");
        cow::disarm();
    }
    const bool done = wait_until([&](cow::Session& session) {
        const board::Header& header = *session.board.header;
        if (const auto& shadows = session.shadows[device_]; shadows && level > 1) {
            const std::lock_guard lock(shadows->mutex);
            if (shadows->release_free_slabs()) session.board.post();
        }
        if (comes_by_itself) {
            const uint64_t free = free_memory().value_or(0);
            return !held() || (free >= size_ && free > free_before);
        }
        return header.pressure[device_].given.load(std::memory_order_acquire) >= level ||
               (level < kGiveUp && !session.board.is_armed());
    });
    if (done || !comes_by_itself || level < kGiveUp) return;
    log::note("nobody gives back what is held beside: it is not waited for any more");
    if (const cow::Reader session; session)
        session->board.header->held[device_].store(0, std::memory_order_release);
}

// Waits for freed blocks: nothing is pending or the job is over, so they will be released.
bool MemoryPressure::wait_for_frees() {
    level_ = kGiveUp;
    cow::disarm();
    if (wait_until([](cow::Session& session) { return frees_taken(session); })) return true;
    log::note("nobody takes what was freed: the board is let go of");
    cow::forget();
    return false;
}

}  // namespace phos
