// The flag that says whether copy-on-write is armed.
#pragma once

#include <atomic>

namespace phos::cow {

// The only branch that a submission takes while nothing is armed. Becomes true only with a closed
// gate, and false at any time.
extern std::atomic<bool> armed;

}  // namespace phos::cow
