// Which image each loaded module and library came from, as a hash: the same kernel of the same
// build is known again in another process.
#pragma once

#include <cstdint>

#include "driver.h"

namespace phos::modules {

// Of the image that the function, or the library's kernel, came with; 0 when it is not known.
uint64_t hash_of(CUfunction function);
uint64_t hash_of(CUkernel kernel);

}  // namespace phos::modules
