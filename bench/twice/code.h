// What kernels were loaded from: as the hook knows it, in files for the analysis.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

namespace twice::code {

// The bytes of an image: in the library that it is linked into, or in a file beside the records, or
// in one that the program has named. An empty path: it is not known.
struct Place {
    std::string library;  // its name; empty if the image came otherwise
    std::string path;
    uint64_t offset = 0;
    uint64_t size = 0;  // 0: the whole file
};

// Remember what a module or a library was loaded from, once the driver has accepted it.
void note_image(const void* handle, const void* image);
void note_file(const void* handle, const char* path);
// Remembers that a function was made from a library's kernel.
void note_function(CUfunction function, CUkernel kernel);
void forget(const void* handle);

// The handle is a function, or a library's kernel used as one.
Place place_of(CUfunction function);

}  // namespace twice::code
