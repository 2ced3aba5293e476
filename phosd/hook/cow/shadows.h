// The shadow slots of one device, and the hook's own stream on which they are filled.
//
// A pending chunk is not being written by anybody, so it is copied on that stream at once, without
// regard to the program's. To mark chunks, to enqueue their copies and to record the event happens
// under one lock: whoever finds a chunk `shadowing` and then takes the lock finds its event too.
#pragma once

#include <deque>
#include <mutex>
#include <vector>

#include "base/driver.h"
#include "cow/mapped_chunk_map.h"

namespace phos::cow {

// Where a block is mapped so that its own device can read it.
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
    std::atomic<bool> done{false};      // all of it is safe, and known to be touched
    std::vector<Source> sources;        // guarded by the lock of the device's shadows
};

// What the work that is looked at has to wait for.
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

    // Imports and maps the slab of a row of the board; `call` names what failed.
    CUresult add_slab(uint32_t row, uint32_t first_slot, uint32_t slots, int descriptor,
                      const char** call);

    // Makes the stream, unless it is there. False when there cannot be one: nothing is shadowed.
    bool ready();
    // Shadows what is pending of chunks [first, last), which are counted from the block's first, as
    // far as there are slots, and says what to wait for. `record` must follow before the lock is
    // let go.
    void cover(const TrackedBlock& block, uint32_t first, uint32_t last, Pending* pending);
    void record(Pending* pending);

    // Marks what has been copied; false when something is still being copied.
    bool complete();
    bool has_passed(uint64_t batch) const { return completed_ >= batch; }
    CUevent event_of(uint64_t batch) const;             // null when it has passed
    uint64_t last_batch_of(const TrackedBlock& block);  // 0 when nothing of it is being copied

    // Waits for copies that complete() knows nothing of, for no event followed them.
    void await_unrecorded();

    // Frees the slots of chunks that are saved, and lets go of slabs that are wholly free; of none
    // into which a copy that no event followed might still run.
    bool release_free_slabs();
    // The hook's stream and events end: with their context, or with the session. Nothing may be
    // being copied any more.
    void end_stream(CUcontext of);
    uint64_t bytes() const;  // of device memory that the slabs hold
    bool runs_in(CUcontext context) const { return stream_ && context_ == context; }
    // Lets go of all slabs; the same holds.
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
        uint32_t cursor = 0;  // where the next slot is looked for
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
    bool unrecorded_ = false;  // a copy was enqueued that no event follows
    std::vector<Slab> slabs_;
    std::deque<Batch> in_flight_;
    std::deque<uint32_t> copying_;  // slots by number, oldest first
    std::vector<CUevent> events_;   // idle
    uint64_t recorded_ = 0;
    uint64_t completed_ = 0;
    uint32_t reclaimed_at_ = 0;  // the board's `progressed`
};

}  // namespace phos::cow
