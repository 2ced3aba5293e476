// Whether copy-on-write is at work.
#pragma once

#include <atomic>

namespace phos::cow {

// The one branch that a submission pays for while nothing is armed. Changes only with a closed gate
// from false to true, and at any time back.
extern std::atomic<bool> armed;

}  // namespace phos::cow
