// Which image each loaded module and library came from, as a hash: the same kernel of the same
// build is known again in another process.
#pragma once

#include <cstdint>

#include "base/driver.h"

namespace phos::modules {

// The hash of an image that the driver has just accepted, so that its own sizes can be believed,
// and of a file with one; 0 when it cannot be had.
uint64_t hash_image(const void* image);
uint64_t hash_file(const char* path);

// What a module, a library, or a function that was made from a library's kernel came from. Its
// handle is forgotten before another may get the same one.
void note(const void* handle, uint64_t hash);
void forget(const void* handle);

// Of the image that the function, or the library's kernel, came with; 0 when it is not known.
uint64_t hash_of(CUfunction function);
uint64_t hash_of(CUkernel kernel);

}  // namespace phos::modules
