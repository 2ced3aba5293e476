// Taking the memory out from under a process that is held at the gate, and putting it back.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/driver.h"
#include "base/outcome.h"
#include "protocol/wire.h"

namespace phos::park {

// Notes that a driver call failed for a block.
Outcome failure(CUresult result, const char* call, uint64_t block);

// Blocks with an id above `after`, with descriptors (to be closed by the caller) when asked for.
struct Listing {
    wire::BlockList head{};
    std::vector<wire::Block> blocks;
    std::vector<int> descriptors;
    Outcome outcome;
};
Listing list(uint64_t after, bool with_descriptors);

// All of these need a closed gate; which one the caller has checked.
Outcome park();
Outcome hand_back(const uint64_t* ids, size_t count, std::vector<int>& descriptors);  // takes them
Outcome unpark();

bool ever_parked();
void newest(uint64_t* last_id, uint64_t* freed);

}  // namespace phos::park
