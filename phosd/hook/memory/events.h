// Notify copy-on-write of changes of memory. cow/events.cpp, in a room above this one, implements
// these functions.
#pragma once

#include <cstdint>

#include "base/driver.h"

namespace phos::events {

// The first four need blocks::mutex. Call it before mappings are removed, or become unreadable:
// waits until no copy reads from there.
void unmapping(uint64_t address, uint64_t size);
void remapped();                     // after any other change of mappings or access rights
void handed_out(uint64_t block_id);  // to a client; also a block newer than the board
void freed(uint64_t block_id, int device, uint64_t size);

void context_ending(CUcontext context);  // before it ends; no longer returned by contexts::any_on()

}  // namespace phos::events
