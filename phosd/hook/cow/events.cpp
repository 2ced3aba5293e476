// Implement memory/events.h for copy-on-write: react to changes of memory during a session.
#include "memory/events.h"

#include <algorithm>

#include "base/process.h"
#include "cow/session.h"
#include "memory/blocks.h"

namespace phos::events {

using cow::Reader;
using cow::Shadows;
using cow::Source;
using cow::TrackedBlock;

namespace {
constexpr long kPause = 20'000;  // nanoseconds
}  // namespace

void unmapping(uint64_t address, uint64_t size) {
    const Reader session;
    if (!session) return;
    session->stale.store(true, std::memory_order_release);
    for (auto at = blocks::by_address.lower_bound(address);
         at != blocks::by_address.end() && at->first - address < size; ++at) {
        TrackedBlock* const tracked = session->find(at->second.block->id);
        if (!tracked) continue;
        tracked->mappings.fetch_sub(1, std::memory_order_acq_rel);
        Shadows* const shadows = session->shadows_of(*tracked);
        if (!shadows) continue;
        std::unique_lock lock(shadows->mutex);
        const uint64_t gone = at->first;
        tracked->sources.erase(
            std::remove_if(tracked->sources.begin(), tracked->sources.end(),
                           [gone](const Source& source) { return source.address == gone; }),
            tracked->sources.end());
        // No new copy starts from there any more, and running ones end soon, since they do not
        // wait for the program's work.
        for (const uint64_t batch = shadows->last_batch_of(*tracked);
             !shadows->complete() && !shadows->has_passed(batch);) {
            lock.unlock();
            pause_for(kPause);
            lock.lock();
        }
        shadows->await_unrecorded();
    }
}

void remapped() {
    const Reader session;
    if (session) session->stale.store(true, std::memory_order_release);
}

void handed_out(uint64_t block_id) {
    const Reader session;
    if (session) session->newest = std::max(session->newest, block_id);
}

void freed(uint64_t block_id, int device, uint64_t size) {
    const Reader session;
    if (!session || block_id > session->newest) return;  // no client has it
    if (device >= 0 && device < static_cast<int>(board::kMaxDevices))
        session->freed_bytes[device].fetch_add(size, std::memory_order_relaxed);
    board::Header& header = *session->board.header;
    const uint64_t posted = header.freed_posted.load(std::memory_order_relaxed);
    header.freed[posted % board::kFreedRing].store(block_id, std::memory_order_relaxed);
    header.freed_posted.store(posted + 1, std::memory_order_release);
    session->board.post();
}

void context_ending(CUcontext context) {
    const Reader session;
    if (!session) return;
    for (const auto& shadows : session->shadows) {
        if (!shadows) continue;
        std::unique_lock lock(shadows->mutex);
        while (shadows->runs_in(context) && !shadows->complete()) {
            lock.unlock();
            pause_for(kPause);
            lock.lock();
        }
        shadows->end_stream(context);
    }
}

}  // namespace phos::events
