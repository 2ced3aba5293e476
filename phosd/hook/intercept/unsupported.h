// What works for the program and cannot be saved in any mode: the driver checkpoints none of it.
#pragma once

namespace phos {

// Marks the process as unsupported when the address is one of managed memory.
void note_if_managed(unsigned long long address, const char* reason);

}  // namespace phos
