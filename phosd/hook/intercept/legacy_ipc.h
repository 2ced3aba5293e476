// Legacy CUDA IPC between hooked processes, by descriptors of the memory. A handle names the block
// in its owner; a process that opens it asks the owner's hook for a descriptor.
#pragma once

#include <cstdint>

namespace phos::legacy_ipc {

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
