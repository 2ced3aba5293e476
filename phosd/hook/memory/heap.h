// Allocate memory for cuMemAlloc and similar functions: large requests get a block, small ones a
// part of a slab. All is virtual memory that can be exported and parked.
#pragma once

#include <memory>

#include "memory/arena.h"
#include "memory/blocks.h"

namespace phos::heap {

// The source of memory: a context or a memory pool. All its blocks have the same access rights.
struct Heap {
    int device;
    CUcontext context;  // null for a pool
    CUmemoryPool pool;  // null for a context
    std::vector<CUmemAccessDesc> access;
    Arena arena;
    uint64_t reserved = 0;  // bytes of device memory that the heap holds
    uint64_t used = 0;      // bytes of these that are allocated
};

struct Allocation {
    uint64_t size;      // as the program asked
    uint64_t reserved;  // as the arena gave
    Heap* heap;
    uint64_t buffer_id;
    bool synchronous = false;  // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    bool freeing = false;
};

// All of these need blocks::mutex, unless they say that they take it.
Heap* of_context(CUcontext context, int device);
Heap* of_pool(CUmemoryPool pool, int device);
Heap* find_context(CUcontext context);  // this and the next return null if it has none
Heap* find_pool(CUmemoryPool pool);
uint64_t reserved_for(const Heap* heap, uint64_t size);  // bytes that `size` bytes take
CUresult allocate(Heap* heap, uint64_t size, uint64_t* address);
void release(uint64_t address);  // frees at once: nothing on the device may use it
void release_all(Heap* heap);    // the same for all of a heap
// For memory that a stream will free later: the address stays unused until it is revived or freed.
Allocation retire(uint64_t address);
void revive(uint64_t address, const Allocation& retired, uint64_t size);
void give_back(uint64_t address, const Allocation& retired);
bool trim(Heap* heap);  // frees slabs that are wholly free; true if there were any
bool trim_all();
std::pair<const uint64_t, Allocation>* find(uint64_t address);
CUresult change_access(Heap* heap, const CUmemAccessDesc* access, size_t count);
// Ends a heap for which stream_frees.h keeps nothing any more. Memory allocated from a pool lives
// on until it is freed; memory of a context has all been freed.
void orphan_pool(CUmemoryPool pool);
void drop_context(CUcontext context);

// Returns whether memory on the device can be made this way; if not, it is left to the driver.
bool supports(int device);

void set_peer_access(int owner, int accessor, bool allow);  // takes the lock

}  // namespace phos::heap
