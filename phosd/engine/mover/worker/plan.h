// The order in which one mover saves the chunks of its GPU while the programs run.
#pragma once

#include <memory>
#include <mutex>

#include "../../chunk_map/view.h"

namespace phos::mover {

using board::View;

// As phosd/engine/mover/worker/plan.py packs and unpacks them.
struct BlockIn {
    uint64_t address;  // in the mover
    uint64_t size;
    uint32_t board;
    uint32_t first_chunk;
};
struct SlabIn {
    uint64_t address;
    uint32_t board;
    uint32_t first_slot;
    uint32_t slots;
    uint32_t reserved;
};
struct Claim {
    uint64_t address;  // to copy from
    uint32_t block;    // as given
    uint32_t index;    // in the block
    uint32_t length;
    uint32_t from_slot;
};
struct Look {
    uint32_t left;        // chunks that were not claimed yet
    uint32_t urgent;      // of them, what a thread of the program waits for
    uint32_t aborted;     // a board's job is over
    uint32_t wanted;      // the highest level of pressure that is not answered
    uint32_t on_the_way;  // batches that were claimed and have not arrived in host memory
};
struct Saving {
    uint64_t median_ns;  // from the claim of a batch to its chunks being marked saved
    uint64_t longest_ns;
};

class Plan {
  public:
    // `wanted`: one byte a chunk, in the order of the blocks; what is not wanted is marked saved.
    // `order`: one number a chunk, 0 for unknown: low ones first. `devices`: the process's ordinal
    // of this GPU, one a board. The views stay the caller's. After `patience` seconds without
    // anything to claim, a shadow that is still being made will not be reported: its program is
    // stopped or gone. What lies in the slot, or the digest, decides.
    Plan(std::vector<View*> views, const uint32_t* devices, const BlockIn* blocks,
         uint32_t block_count, const uint8_t* wanted, const uint32_t* order, const SlabIn* slabs,
         uint32_t slab_count, uint32_t batch_count, double patience);

    Look look();
    // Claims at most `most` chunks as batch `batch`, which must be free. Their number.
    uint32_t claim(uint32_t batch, uint32_t most, Claim* claims);
    // The bytes of a batch are safe: marks its chunks saved and wakes who waits for them.
    void arrived(uint32_t batch);
    void wait(double seconds);
    void abort();

    // Pressure. Blocks that were freed and are saved, and slabs that were released; with `all`,
    // those that are not, too: nobody may be copying them. Each is named once; `blocks` and `slabs`
    // have room for all. False: freed blocks are left that are not saved.
    bool droppable(bool all, uint32_t* blocks, uint32_t* block_count, uint32_t* slabs,
                   uint32_t* slab_count);
    void freed_first() { freed_first_ = true; }
    void answer();  // the levels that `look` saw

    Saving saving();

  private:
    struct Chunk {
        std::atomic<uint32_t>* word;
        uint64_t address;
        uint32_t length;
        uint32_t block;
        uint32_t index;
        bool wanted;  // and not claimed yet
    };
    struct Block {
        BlockIn in;
        uint64_t id;     // on the board
        uint32_t first;  // of chunks_
        uint32_t count;
        uint32_t left;  // to claim
        std::atomic<uint32_t> unsaved;
        bool freed;
        bool dropped;
    };
    struct Board {
        View* view;
        uint32_t device;
        uint32_t posted;
        uint32_t level;  // of pressure, as last seen
    };
    struct Slab {
        SlabIn in;
        board::SlabRow* row;  // null: the board has none there
        bool dropped;
    };
    struct Batch {
        std::vector<uint32_t> chunks;
        uint64_t claimed_ns = 0;
    };

    void find_ids();
    board::SlabRow* row_of(const SlabIn& slab);
    void survey();
    void note_freed(uint32_t board);
    bool claim_pending(uint32_t chunk);
    void take(Batch& batch, uint32_t chunk, uint64_t address, bool from_slot, Claim* claims);
    bool take_pending(Batch& batch, uint32_t chunk, Claim* claims);
    void take_shadow(Batch& batch, uint32_t chunk, Claim* claims);
    void take_block(Batch& batch, uint32_t chunk, Claim* claims);

    std::vector<Board> boards_;
    std::unique_ptr<Block[]> blocks_;
    uint32_t block_count_;
    std::vector<Slab> slabs_;
    std::vector<Chunk> chunks_;
    std::vector<Batch> batches_;
    std::vector<uint32_t> order_;
    size_t cursor_ = 0;  // in order_: everything before it is claimed or no longer pending
    uint32_t left_ = 0;
    uint32_t slots_ = 0;
    bool freed_first_ = false;
    bool overdue_ = false;  // shadows that are still being made have had time enough
    uint64_t patience_ns_;
    uint64_t last_claim_ns_;

    // The last survey: chunks by what is to be done with them.
    std::vector<uint32_t> urgent_, late_, shadowing_, shadowed_, orphaned_;
    uint64_t surveyed_ns_ = 0;

    std::atomic<uint32_t> on_the_way_{0};
    std::mutex mutex_;
    std::vector<uint64_t> durations_;  // guarded by mutex_
};

}  // namespace phos::mover
