// Memory that the hook makes for cuMemAlloc and its kin: a block of its own for what is large, a
// share of a slab for what is small, always on virtual memory that can be exported and parked.
#pragma once

#include <memory>

#include "memory/arena.h"
#include "memory/blocks.h"

namespace phos::heap {

// Where memory comes from: a context, or a memory pool. Its blocks have one set of accesses.
struct Heap {
    int device;
    CUcontext context;  // null for a pool
    CUmemoryPool pool;  // null for a context
    std::vector<CUmemAccessDesc> access;
    Arena arena;
    uint64_t reserved = 0;  // bytes of device memory that the heap holds
    uint64_t used = 0;      // bytes of it that are allocated
};

struct Allocation {
    uint64_t size;      // as the program asked
    uint64_t reserved;  // as the arena gave
    Heap* heap;
    uint64_t buffer_id;
    bool synchronous = false;  // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    bool freeing = false;
};

// All of these need blocks::mutex, except where they say that they take it.
Heap* of_context(CUcontext context, int device);
Heap* of_pool(CUmemoryPool pool, int device);
Heap* find_context(CUcontext context);  // this and the next: null when it has none
Heap* find_pool(CUmemoryPool pool);
uint64_t reserved_for(const Heap* heap, uint64_t size);  // bytes that `size` bytes take
CUresult allocate(Heap* heap, uint64_t size, uint64_t* address);
void release(uint64_t address);  // gives back at once: nothing on the device may still use it
void release_all(Heap* heap);    // the same for all of a heap
// For memory that a stream will free later: the address is nobody's until it is revived or given
// back.
Allocation retire(uint64_t address);
void revive(uint64_t address, const Allocation& retired, uint64_t size);
void give_back(uint64_t address, const Allocation& retired);
bool trim(Heap* heap);  // gives wholly free slabs back; true when there were any
bool trim_all();
std::pair<const uint64_t, Allocation>* find(uint64_t address);
CUresult change_access(Heap* heap, const CUmemAccessDesc* access, size_t count);
// The end of a heap, of which nothing is kept for streams any more (stream_frees.h). Of a pool's,
// what was allocated from it lives on until it is freed; of a context's, all has been released.
void orphan_pool(CUmemoryPool pool);
void drop_context(CUcontext context);

// Whether memory on the device can be made so at all; otherwise it is left to the driver.
bool supports(int device);

void set_peer_access(int owner, int accessor, bool allow);  // takes the lock

}  // namespace phos::heap
