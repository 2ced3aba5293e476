// Managed memory in the host: `phos run --managed=host` (PHOS_MANAGED=host) has cuMemAllocManaged
// give host memory that the devices see, which can be saved. What says where managed memory should
// be succeeds without effect.
#pragma once

#include <cstdint>
#include <optional>

#include "base/driver.h"

namespace phos::managed {

// Frees managed memory that is in the host, as cuMemFree does; nothing if `address` is in none.
std::optional<CUresult> free(uint64_t address);

// Sets the range that `address` is in; false if it is in none.
bool range_of(uint64_t address, uint64_t* start, uint64_t* size);

// Replaces what the driver says of host memory by what it says of managed memory.
void answer(void* data, CUpointer_attribute attribute);

}  // namespace phos::managed
