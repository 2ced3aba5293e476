// Memory freed on a stream is kept, with an event that says when, and handed out again: to the same
// stream at once, to others when the event has passed.
#pragma once

#include "memory/heap.h"

namespace phos::stream_frees {

// A stream as the order of work sees it: a per-thread stream is another one in each thread.
struct StreamKey {
    CUcontext context;
    CUstream stream;
    long thread;
    bool operator==(const StreamKey& other) const {
        return context == other.context && stream == other.stream && thread == other.thread;
    }
};

// All of these need blocks::mutex, except where they say otherwise.

// Keeps memory that is freed on a stream, and the event that was recorded there.
void keep(uint64_t address, const StreamKey& stream, CUevent event);

// Memory freed before that `stream` may have now, 0 when there is none.
uint64_t reuse(const heap::Heap* heap, uint64_t size, const StreamKey& stream);

// Gives back what has been freed and is past its event: all of a heap's (of every heap's when null)
// as long as more than `keep` bytes remain.
bool give_back_passed(const heap::Heap* heap, uint64_t keep);

// Of each heap as above, as long as more than `keep(heap)` bytes remain.
void give_back_passed(uint64_t (*keep)(const heap::Heap& heap));

// Bytes freed that are kept for now. Needs no lock.
uint64_t kept();

// Gives back what was freed on streams, waiting for the current context if nothing can be had
// without; the lock is let go meanwhile. False when nothing was freed.
bool reclaim(std::unique_lock<std::mutex>& lock);

// A context ends: until it has, or has not, nobody asks what was freed on its streams; once it has
// ended, all of that is past. They take the lock.
void context_ending(CUcontext context);
void context_ended(CUcontext context, bool ended);

// The end of a heap, with what was freed on streams in it: a pool's is orphaned, and a context's
// gives back everything.
void orphan_pool(CUmemoryPool pool);
void free_all_of(CUcontext context);  // takes the lock

}  // namespace phos::stream_frees
