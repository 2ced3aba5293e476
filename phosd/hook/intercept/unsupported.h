// Detect features that no mode can save, because the driver's checkpoint does not support them; and
// work that passes no gate, so that only the driver may save the process.
#pragma once

namespace phos {

// Marks the process as unsupported if the address is in managed memory.
void note_if_managed(unsigned long long address, const char* reason);

// Marks the process as not parkable if a library is loaded that submits work through private tables
// of the driver. Its calls cannot be seen, so being loaded counts.
void note_libraries();

}  // namespace phos
