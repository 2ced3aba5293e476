// Unmap and release the memory of a process that is held at the gate, and map it again.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/driver.h"
#include "base/outcome.h"
#include "protocol/wire.h"

namespace phos::park {

// Records that a driver call failed for a block.
Outcome failure(CUresult result, const char* call, uint64_t block);

// Blocks with an id above `after`; if requested, with descriptors that the caller closes.
struct Listing {
    wire::BlockList head{};
    std::vector<wire::Block> blocks;
    std::vector<int> descriptors;
    Outcome outcome;
};
Listing list(uint64_t after, bool with_descriptors);

// All of these need a closed gate; the caller has checked its state.
Outcome park();
Outcome hand_back(const uint64_t* ids, size_t count, std::vector<int>& descriptors);  // takes them
// After a restore on a GPU that the process did not see before, the driver imports no memory of it
// there, but makes some: made, filled by the client, and then handed back.
Outcome make(const std::vector<uint64_t>& ids, std::vector<int>* descriptors);  // caller closes
Outcome filled(const std::vector<uint64_t>& ids, bool renewed);
Outcome unpark();

bool ever_parked();
void newest(uint64_t* last_id, uint64_t* freed);

}  // namespace phos::park
