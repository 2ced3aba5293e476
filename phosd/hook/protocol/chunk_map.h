// The board (chunk map): memory shared by the hook, the data movers and the engine, while a
// process's chunks are saved by copy-on-write, and afterwards to report freed memory to the engine.
//
// The engine creates it (a memfd, sealed against resizing), fills in the tables and the first
// states, and gives a descriptor to the hook (`arm`) and to each mover (`Drain`). Everything is
// little-endian. The program can write the board, as it can write the memory that is being saved:
// an index or a state read here may affect only the image of that process, and the digests decide
// what is published.
#pragma once

#include <atomic>
#include <cstdint>

namespace phos::board {

constexpr uint64_t kMagic = 0x4452414F42534F50;  // "POSBOARD"
constexpr uint32_t kVersion = 3;
constexpr uint64_t kChunk = 2ull << 20;  // bytes; a block's last chunk may be shorter
constexpr uint32_t kMaxDevices = 16;
constexpr uint32_t kFreedRing = 1024;
constexpr uint32_t kNoChunk = ~0u;

// The low bits of a chunk's word. Every step is one compare-and-swap:
//   pending -> copying -> saved               the mover, from the block
//   pending -> shadowing -> shadowed          the hook: enqueued; then the copy has been made
//   shadowed -> saved                         the mover, from the slot
// `saved` also means that the chunk is not needed: the store has it, or the job gave up.
enum State : uint32_t { pending = 0, copying = 1, saved = 2, shadowing = 3, shadowed = 4 };
constexpr uint32_t kStateMask = 7;
constexpr uint32_t kUrgent = 8;     // a thread waits for this chunk to be saved
constexpr uint32_t kSlotShift = 8;  // the shadow slot, counted over all slabs

enum Phase : uint32_t {
    armed = 0,    // writers of pending chunks must shadow them
    watched = 1,  // nothing is pending any more; freed blocks are reported to the engine
    aborted = 2,  // the job is over: no chunk is needed, no thread waits. If a mover or the engine
                  // has set it, all memory is released
};

struct alignas(64) Pressure {
    // The hook's request for memory of a device: 1: free released slabs and freed blocks that are
    // saved; 2: save freed blocks before all others, and free them; 3: give up. The mover answers
    // by storing the level that it has carried out. The hook resets it to 0.
    std::atomic<uint32_t> wanted;
    std::atomic<uint32_t> given;
};
constexpr uint32_t kGiveUp = 3;  // the last level

// Buckets of the time that predictions took: eight for each doubling of nanoseconds. The last has
// no upper bound.
constexpr uint32_t kLookBuckets = 128;
constexpr uint32_t look_bucket(uint64_t ns) {
    if (ns < 8) return static_cast<uint32_t>(ns);
    const auto doublings = static_cast<uint32_t>(60 - __builtin_clzll(ns));
    const uint64_t bucket = uint64_t{8} * (doublings + 1) + (ns >> doublings) % 8;
    return bucket < kLookBuckets ? static_cast<uint32_t>(bucket) : kLookBuckets - 1;
}
// Returns the lowest value in a bucket.
constexpr uint64_t look_floor(uint32_t bucket) {
    return bucket < 8 ? bucket : (8ull + bucket % 8) << (bucket / 8 - 1);
}

struct Header {
    uint64_t magic;
    uint32_t version;
    uint32_t block_count;
    uint32_t chunk_count;
    uint32_t slab_count;
    uint32_t slot_count;
    uint32_t kernel_count;
    uint64_t size;        // of the board, bytes
    uint64_t blocks_at;   // offsets from the header: BlockRow[block_count], by id
    uint64_t chunks_at;   // std::atomic<uint32_t>[chunk_count]
    uint64_t touched_at;  // std::atomic<uint32_t>[chunk_count]
    uint64_t slabs_at;    // SlabRow[slab_count]
    uint64_t kernels_at;  // KernelRow[kernel_count], by (name hash, module)

    alignas(64) std::atomic<uint32_t> phase;
    // Futex words. `posted` counts events for the movers: urgent chunks, pressure, frees.
    // `progressed` counts events for the hook: chunks saved, pressure answered.
    alignas(64) std::atomic<uint32_t> posted;
    alignas(64) std::atomic<uint32_t> progressed;

    // Ids of blocks that existed at `arm` and were freed by the program: freed[n % kFreedRing] is
    // written before `freed_posted` becomes n + 1. A full ring loses ids; the reader then lists the
    // blocks again.
    alignas(64) std::atomic<uint64_t> freed_posted;
    std::atomic<uint64_t> freed_taken;  // of these the memory is released
    std::atomic<uint64_t> freed[kFreedRing];

    Pressure pressure[kMaxDevices];  // by the process's ordinals
    // Bytes of a device that the engine holds besides everything above. It frees them as soon as it
    // can; at once at the last level of pressure.
    std::atomic<uint64_t> held[kMaxDevices];

    // Counted by the hook.
    alignas(64) std::atomic<uint64_t> submissions;  // whose writes were predicted
    std::atomic<uint64_t> looked_ns;                // time spent predicting, waits excluded
    std::atomic<uint64_t> shadowed_chunks;
    std::atomic<uint64_t> waits;                // for a chunk, because no slot was free or it
    std::atomic<uint64_t> waited_ns;            // was being copied
    std::atomic<uint64_t> conservative;         // submissions predicted to write everything
    std::atomic<uint32_t> touches;              // the last number given in `touched`
    std::atomic<uint32_t> looks[kLookBuckets];  // submissions by their looked_ns
};

struct BlockRow {
    uint64_t id;  // as wire::Block
    uint32_t first_chunk;
    uint32_t chunk_count;
};

// Device memory for shadows, allocated by a mover. Its slots follow those of the slab before it.
struct SlabRow {
    int32_t device;                  // the process's ordinal
    uint32_t slots;                  // of kChunk bytes
    std::atomic<uint32_t> released;  // 1: the hook has released it, so the mover may free it
    uint32_t reserved;
};

// What is known about a kernel. Words are counted in the parameter buffer: bit n of a mask stands
// for the aligned 8 bytes at 8 * n; words beyond 63 are treated as without a row.
enum KernelFlags : uint32_t {
    kSuspect = 1,     // wrote memory that was not predicted: predicted to write everything
    kWritesOnly = 2,  // writes only through the words of `written`, nowhere else
};
struct KernelRow {
    uint64_t name_hash;  // 64-bit FNV-1a of the kernel's name as cuFuncGetName gives it
    uint64_t module;     // hash of the module's image; 0: any
    uint32_t flags;
    uint32_t range_count;  // reserved for ranges; 0
    uint64_t written;      // with kWritesOnly: the words that it writes through
};

}  // namespace phos::board
