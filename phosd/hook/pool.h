// Stream-ordered memory of device pools, redirected to memory of the hook.
#pragma once

#include "heap.h"

namespace phos::pool {

// Gives back what was freed on streams, waiting for the current context if nothing can be had
// without; the lock (of blocks::mutex) is let go meanwhile. False when nothing was freed.
bool reclaim(std::unique_lock<std::mutex>& lock);

// A context ends: until it has, or has not, nobody asks what was freed on its streams; once it has
// ended, all of that is past. Not with blocks::mutex.
void context_ending(CUcontext context);
void context_ended(CUcontext context, bool ended);

// Gives back all that was freed on streams in a heap that ends. Needs blocks::mutex.
void give_back_all(heap::Heap* heap);

}  // namespace phos::pool
