// Legacy CUDA IPC between hooked processes, by descriptors of the memory. A handle names the block
// in its owner; a process that opens it asks the owner's hook for a descriptor.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "memory/blocks.h"
#include "memory/heap.h"

namespace phos::legacy_ipc {

constexpr uint64_t kMemoryMagic = 0x3143'5049'534f'4850;  // "PHOSIPC1"
constexpr uint64_t kEventMagic = 0x3145'5049'534f'4850;   // "PHOSIPE1"
constexpr uint64_t kPoolMagic = 0x314f'5049'534f'4850;    // "PHOSIPO1", of pool_sharing.h

// The content of the 64 opaque bytes of a CUipcMemHandle, a CUipcEventHandle or a
// CUmemPoolPtrExportData: a part of a block.
struct Ticket {
    uint64_t magic;
    uint64_t nonce;  // of the owner; also in its socket's name, which cannot be guessed then
    uint64_t block;
    uint64_t block_size;
    uint64_t offset;  // of the allocation in the block, or of the event's words
    uint64_t size;
    uint64_t began;  // start time of the owner when it made the ticket
    int32_t pid;
    uint32_t generation;  // of the event
};
static_assert(sizeof(Ticket) <= CU_IPC_HANDLE_SIZE);

// Makes a ticket for a part of a block that is exported. Needs blocks::mutex.
Ticket ticket(uint64_t magic, const blocks::Block& block, uint64_t offset, uint64_t size);

// Exports the block of an allocation, and makes a ticket for the allocation. For a callback of
// reexport::sharing. Needs blocks::mutex.
CUresult issue(uint64_t magic, const std::pair<const uint64_t, heap::Allocation>& found,
               Ticket* made, uint64_t* to_reexport);

// Maps the block of a ticket here, unless it is, and returns the address of the part. Waits while
// the owner is parked or detached. The caller holds neither the gate nor a lock. Words of events
// stay mapped for good: no call says when the device is done with them. It is mapped for `gpu`, or
// for that of the current context.
CUresult open(const Ticket& ticket, CUdeviceptr* address, std::optional<int> gpu = std::nullopt);

// Undoes an opening that the device is done with. Needs a gate::Pass and blocks::mutex.
CUresult close(uint64_t address);

// For the hook's thread: the socket for peers' requests (-1 while there is none), and serving one
// request on a connection, which is then closed.
int listener();
void serve(int peer);

void attach();  // opens the listener
void detach();  // closes it, for a dump

// Returns the range of a peer's allocation that was opened and contains `address`. Needs
// blocks::mutex.
bool range_of(uint64_t address, uint64_t* start, uint64_t* size);

}  // namespace phos::legacy_ipc
