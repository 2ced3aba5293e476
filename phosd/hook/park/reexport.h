// Memory that came back from a checkpoint is an import, which the driver does not export again.
// Here it becomes the process's own once more, by a copy on the device, at the same addresses.
#pragma once

#include <set>

#include "base/driver.h"
#include "park/park.h"

namespace phos::reexport {

// Every such block that no peer holds. Needs a closed gate.
Outcome all();
Outcome some(const std::set<uint64_t>& ids);

// One block, for a program that is about to share it: brings the program to rest for the moment of
// the copy. The block is a new one to clients afterwards. CUDA_SUCCESS also when nothing is to be
// done any more; CUDA_ERROR_NOT_SUPPORTED when the program does not come to rest.
CUresult for_sharing(uint64_t id);

// Calls `share(&id)`, which exports a block, or sets the id of the one that must be made the
// process's own first; then again. The caller holds neither the gate nor a lock.
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
