// Copy imported memory, on the device, into memory that the process owns, at the same addresses.
// Memory that came back from a checkpoint is imported, and the driver does not export imports
// again.
#pragma once

#include <set>

#include "base/driver.h"
#include "park/park.h"

namespace phos::reexport {

// Copies every such block that no peer holds. Needs a closed gate.
Outcome all();
Outcome some(const std::set<uint64_t>& ids);

// Copies one block that the program is about to share, and quiesces the program for the moment of
// the copy. To clients the block is a new one afterwards. Returns CUDA_SUCCESS also if nothing
// needs to be done; CUDA_ERROR_NOT_SUPPORTED if the program does not come to rest.
CUresult for_sharing(uint64_t id);

// Calls `share(&id)`, which exports a block or sets the id of a block that must first be copied;
// then calls it again. The caller holds neither the gate nor a lock.
template <class Share>
CUresult sharing(Share share) {
    for (;;) {
        uint64_t id = 0;
        CUresult result = share(&id);
        if (!id) return result;
        result = for_sharing(id);
        if (result != CUDA_SUCCESS) return result;
    }
}

}  // namespace phos::reexport
