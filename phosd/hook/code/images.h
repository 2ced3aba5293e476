// Remember the images that modules and libraries were loaded from, so that phosd can read them from
// the process and analyse their kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "protocol/wire.h"

namespace phos::images {

struct Image {
    uint64_t hash;     // as modules.h computes it
    uint64_t address;  // 0: its bytes were not kept
    uint64_t size;     // bytes
    wire::Held held;
    std::string path;  // of an image in a file of its own
};

// Remembers an image, which the driver has just accepted. The program may free one that is in no
// loaded object, so that one is copied, as long as all copies stay below a limit.
void note(uint64_t hash, const void* bytes, uint64_t size);
void note_file(uint64_t hash, const char* path, uint64_t size);

// Returns all from the number `first` on, each hash once, in the order in which they came.
std::vector<Image> after(size_t first);

}  // namespace phos::images
