// What memory tells whoever follows it while it changes: copy-on-write, which implements these
// (cow/events.cpp) and stands above. Nothing is told to anybody else, and nothing is answered.
#pragma once

#include <cstdint>

#include "base/driver.h"

namespace phos::events {

// The first four need blocks::mutex. Before mappings go: waits until nothing is being copied from
// there. (Also before they can be read no more.)
void unmapping(uint64_t address, uint64_t size);
void remapped();                     // after any other change of mappings or accesses
void handed_out(uint64_t block_id);  // a client has it now, also one made after the board
void freed(uint64_t block_id, int device, uint64_t size);

void context_ending(CUcontext context);  // before; it is not among contexts::any_on() any more

}  // namespace phos::events
