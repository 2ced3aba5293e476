// What works for the program and cannot be saved in any mode: the driver checkpoints none of it.
// And what passes no gate, so that only the driver may save it.
#pragma once

namespace phos {

// Marks the process as unsupported when the address is one of managed memory.
void note_if_managed(unsigned long long address, const char* reason);

// Marks the process as not parkable when a library is loaded that gives the GPU work through
// private tables of the driver's. What it does cannot be seen, so being loaded counts.
void note_libraries();

}  // namespace phos
