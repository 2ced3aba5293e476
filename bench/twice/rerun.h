// One launch, run a second time.
#pragma once

#include <cuda.h>

#include <functional>
#include <string>
#include <vector>

namespace twice {

struct Launch {
    CUfunction function = nullptr;
    unsigned grid[3] = {};
    unsigned block[3] = {};
    unsigned shared_bytes = 0;
    void** parameters = nullptr;
    void** extra = nullptr;
    std::function<CUresult()> again;  // launches the same once more
};

// Returns the name of a kernel; empty if the driver does not tell it.
std::string name_of(CUfunction function);

// Launches the same once more, after all that was launched before, and writes whether the device
// memory that the program has was another afterwards. It is put back then. Throws Failed.
void rerun(const Launch& launch);

}  // namespace twice
