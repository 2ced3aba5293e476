// Keep memory that was freed on a stream, with an event of when, and reuse it: on the same stream
// at once, on others after the event.
#pragma once

#include "memory/heap.h"

namespace phos::stream_frees {

// A stream as far as the order of work is concerned: a per-thread stream differs in each thread.
struct StreamKey {
    CUcontext context;
    CUstream stream;
    long thread;
    bool operator==(const StreamKey& other) const {
        return context == other.context && stream == other.stream && thread == other.thread;
    }
};

// All of these need blocks::mutex, unless they say otherwise.

// Keeps memory that is freed on a stream, and the event recorded there.
void keep(uint64_t address, const StreamKey& stream, CUevent event);

// The same for `size` bytes that another process has allocated, and that are mapped here: `close`
// takes that back. `heap` stands for all of these, and has no memory.
void keep_opened(uint64_t address, uint64_t size, heap::Heap* heap, void (*close)(uint64_t address),
                 const StreamKey& stream, CUevent event);

// Returns memory freed earlier that `stream` may use now; 0 if there is none.
uint64_t reuse(const heap::Heap* heap, uint64_t size, const StreamKey& stream);

// Frees memory past its event: of one heap (null: of every heap), while more than `keep` bytes
// remain.
bool give_back_passed(const heap::Heap* heap, uint64_t keep);

// The same for every heap, while more than `keep(heap)` bytes remain.
void give_back_passed(uint64_t (*keep)(const heap::Heap& heap));

// Returns the bytes that were freed and are still kept. Needs no lock.
uint64_t kept();

// Frees what was freed on streams, waiting for the current context if necessary, with the lock
// released. False if nothing was freed.
bool reclaim(std::unique_lock<std::mutex>& lock);

// Called when a context is about to end: its events are not queried until it has ended, after which
// all are past, or has not. They take the lock.
void context_ending(CUcontext context);
void context_ended(CUcontext context, bool ended);

// Ends a heap and what was freed on streams in it: a pool's is orphaned, a context's freed.
void orphan_pool(CUmemoryPool pool);
void free_all_of(CUcontext context);  // takes the lock

}  // namespace phos::stream_frees
