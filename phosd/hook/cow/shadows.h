// The shadow slots of one device, and the hook's stream on which they are filled.
//
// A pending chunk has no writer, so it is copied on that stream at once, independently of the
// program's streams. Marking chunks, enqueueing their copies and recording the event happen under
// one lock: a thread that finds a chunk `shadowing` and then takes the lock finds its event, too.
#pragma once

#include <deque>
#include <mutex>
#include <vector>

#include "base/driver.h"
#include "cow/mapped_chunk_map.h"

namespace phos::cow {

// A mapping of a block that its own device can read.
struct Source {
    uint64_t address;
    uint64_t offset;  // in the block
    uint64_t size;
};

// A block of the board.
struct TrackedBlock {
    uint64_t id = 0;
    uint64_t size = 0;  // bytes
    uint32_t first_chunk = 0;
    uint32_t chunks = 0;
    int device = -1;
    std::atomic<uint32_t> mappings{0};  // without any, nothing can write to it
    std::atomic<bool> done{false};      // all of it is safe, and marked as touched
    std::vector<Source> sources;        // guarded by the lock of the device's shadows
};

// What the submitted work has to wait for.
struct Pending {
    uint64_t batch = 0;    // of copies on the hook's stream; 0: none
    bool blocked = false;  // a chunk that only the mover can make safe
};

class Shadows {
  public:
    Shadows(int device, MappedChunkMap board) : device_(device), board_(board) {}
    Shadows(const Shadows&) = delete;
    Shadows& operator=(const Shadows&) = delete;

    std::mutex mutex;
    // All below need the lock.

    // Imports and maps the slab of a row of the board; on failure `call` names the driver call.
    CUresult add_slab(uint32_t row, uint32_t first_slot, uint32_t slots, int descriptor,
                      const char** call);

    // Creates the stream if needed. False if it cannot be created: nothing is shadowed then.
    bool ready();
    // Shadows the pending chunks of [first, last), counted from the block's first, while there are
    // free slots, and returns what to wait for. Call `record` before the lock is released.
    void cover(const TrackedBlock& block, uint32_t first, uint32_t last, Pending* pending);
    void record(Pending* pending);

    // Marks finished copies. False if some are unfinished.
    bool complete();
    bool has_passed(uint64_t batch) const { return completed_ >= batch; }
    CUevent event_of(uint64_t batch) const;             // null if it has passed
    uint64_t last_batch_of(const TrackedBlock& block);  // 0 if no copy of it is in progress

    // Waits for copies that complete() does not know, because no event was recorded after them.
    void await_unrecorded();

    // Frees the slots of saved chunks, and releases slabs that are wholly free, except those that a
    // copy without an event may still write to.
    bool release_free_slabs();
    // Ends the hook's stream and events, with their context or with the session. No copy may be in
    // progress.
    void end_stream(CUcontext of);
    uint64_t bytes() const;  // of device memory that the slabs hold
    bool runs_in(CUcontext context) const { return stream_ && context_ == context; }
    // Releases all slabs, under the same condition.
    void release();

  private:
    struct Slot {
        uint32_t chunk = board::kNoChunk;  // none: the slot is free
        uint64_t batch = 0;
    };
    struct Slab {
        uint32_t row;
        uint32_t first_slot;
        std::vector<Slot> slots;
        uint32_t used = 0;
        uint32_t cursor = 0;  // where the search for a slot begins
        CUdeviceptr address = 0;
        CUmemGenericAllocationHandle handle = 0;

        uint64_t bytes() const { return slots.size() * board::kChunk; }
    };
    struct Run {
        Slab* slab;
        uint32_t first;  // in the slab
        uint32_t count;
    };
    struct Batch {
        uint64_t number;
        CUevent event;
    };

    uint32_t shadow(const TrackedBlock& block, uint32_t first, uint32_t last);
    Run free_run(uint32_t wanted);
    void occupy(const Run& run, uint32_t count, uint32_t first_chunk);
    void withdraw(size_t count);
    void reclaim();
    void finish(uint32_t slot, uint32_t word);
    Slab* slab_of(uint32_t slot);
    Slot* slot_at(uint32_t slot);
    uint64_t batch_of(uint32_t slot);
    void let_go(Slab& slab);

    const int device_;
    MappedChunkMap board_;
    CUcontext context_ = nullptr;
    CUstream stream_ = nullptr;
    bool failed_ = false;      // nothing is shadowed any more
    bool unrecorded_ = false;  // a copy was enqueued, but no event after it
    std::vector<Slab> slabs_;
    std::deque<Batch> in_flight_;
    std::deque<uint32_t> copying_;  // slots by number, oldest first
    std::vector<CUevent> events_;   // idle
    uint64_t recorded_ = 0;
    uint64_t completed_ = 0;
    uint32_t reclaimed_at_ = 0;  // the board's `progressed`
};

}  // namespace phos::cow
