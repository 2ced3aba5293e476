// Legacy CUDA IPC between hooked processes, over descriptors of the memory. A handle names the
// block in its owner; whoever opens it asks the owner's hook for a descriptor.
#pragma once

#include <cstdint>

namespace phos::legacy_ipc {

// For the hook's thread: where peers ask for memory (-1 while nobody may), and one such request on
// a connection, which is closed.
int listener();
void serve(int peer);

void attach();  // opens the listener
void detach();  // closes it, for a dump

// The range of a peer's allocation that was opened at or around `address`. Needs blocks::mutex.
bool range_of(uint64_t address, uint64_t* start, uint64_t* size);

}  // namespace phos::legacy_ipc
