// Record the image that each loaded module and library came from, as a hash, which identifies the
// same kernel of the same build in other processes.
#pragma once

#include <cstdint>

#include "base/driver.h"

namespace phos::modules {

// Records the hash of an image for a module or a library: of one that the driver has just accepted,
// so that its size fields can be trusted, or of a file with one; 0 if there is none.
void note_image(const void* handle, const void* image);
void note_file(const void* handle, const char* path);

// Records the hash for a function made from a library's kernel. Forget a handle before it can be
// reused.
void note(const void* handle, uint64_t hash);
void forget(const void* handle);

// Returns the hash of the image of a function or a library's kernel; 0 if unknown.
uint64_t hash_of(CUfunction function);
uint64_t hash_of(CUkernel kernel);

}  // namespace phos::modules
