#include "code.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "driver.h"

namespace twice::code {
namespace {

// The formats of an image, by their first bytes. PTX text has no magic.
constexpr uint32_t kFatWrapper = 0x4662'43B1;
constexpr uint32_t kFatBinary = 0xBA55'ED50;
struct FatWrapper {
    uint32_t magic;
    uint32_t version;
    const void* data;
    void* file;
};
struct FatHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t header_size;
    uint64_t size;  // of what follows the header
};

std::mutex mutex;
std::unordered_map<const void*, Place> places;  // by module, library, or function of a kernel

std::pair<const unsigned char*, uint64_t> bytes_of(const void* image) {
    uint32_t magic = 0;
    std::memcpy(&magic, image, sizeof magic);
    if (magic == kFatWrapper) {
        FatWrapper wrapper;
        std::memcpy(&wrapper, image, sizeof wrapper);
        image = wrapper.data;
        if (!image) return {nullptr, 0};
        std::memcpy(&magic, image, sizeof magic);
    }
    const auto* const bytes = static_cast<const unsigned char*>(image);
    uint64_t size = 0;
    if (magic == kFatBinary) {
        FatHeader header;
        std::memcpy(&header, image, sizeof header);
        size = header.header_size + header.size;
    } else if (std::memcmp(image, ELFMAG, SELFMAG) == 0) {
        Elf64_Ehdr header;
        std::memcpy(&header, image, sizeof header);
        size = std::max<uint64_t>(
            header.e_shoff + static_cast<uint64_t>(header.e_shnum) * header.e_shentsize,
            header.e_phoff + static_cast<uint64_t>(header.e_phnum) * header.e_phentsize);
    } else if (std::isprint(*bytes) || std::isspace(*bytes)) {
        size = std::strlen(static_cast<const char*>(image));
    }
    return {bytes, size};
}

struct Search {
    uint64_t begin;
    uint64_t end;
    Place found;
};

// Returns where bytes are in the file of a loaded object.
Place in_object(const void* bytes, uint64_t size) {
    const auto address = reinterpret_cast<uint64_t>(bytes);
    Search search{address, address + size, {}};
    const auto look = [](dl_phdr_info* object, size_t, void* data) {
        auto* const wanted = static_cast<Search*>(data);
        for (size_t i = 0; i < object->dlpi_phnum; ++i) {
            const auto& segment = object->dlpi_phdr[i];
            const uint64_t begin = object->dlpi_addr + segment.p_vaddr;
            if (segment.p_type != PT_LOAD || wanted->begin < begin ||
                begin + segment.p_filesz < wanted->end)
                continue;
            const std::string path = *object->dlpi_name ? object->dlpi_name : "/proc/self/exe";
            wanted->found = {path.substr(path.rfind('/') + 1), path,
                             wanted->begin - begin + segment.p_offset, wanted->end - wanted->begin};
            return 1;
        }
        return 0;
    };
    dl_iterate_phdr(look, &search);
    return search.found;
}

// Keeps a copy beside the records, since the program may free what it has compiled.
Place copied(const unsigned char* bytes, uint64_t size) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (uint64_t at = 0; at < size; ++at) hash = (hash ^ bytes[at]) * 0x100000001B3u;
    char name[32];
    std::snprintf(name, sizeof name, "/%016llx.image", static_cast<unsigned long long>(hash));
    const std::string records = std::getenv("TWICE_RECORDS");
    const std::string path = records.substr(0, records.rfind('/')) + name;
    std::FILE* const file = std::fopen(path.c_str(), "wbe");
    if (!file) return {};
    const bool written = std::fwrite(bytes, 1, size, file) == size;
    return std::fclose(file) == 0 && written ? Place{"", path, 0, size} : Place{};
}

void note(const void* handle, const Place& place) {
    const std::lock_guard lock(mutex);
    places[handle] = place;
}

Place find(const void* handle) {
    const std::lock_guard lock(mutex);
    const auto found = places.find(handle);
    return found == places.end() ? Place{} : found->second;
}

Place place_of(CUkernel kernel) {
    CUlibrary library = nullptr;
    if (driver.cuKernelGetLibrary(&library, kernel) != CUDA_SUCCESS) return {};
    return find(library);
}

}  // namespace

void note_image(const void* handle, const void* image) {
    const auto [bytes, size] = bytes_of(image);
    if (!size) return;
    Place place = in_object(bytes, size);
    if (place.path.empty()) place = copied(bytes, size);
    note(handle, place);
}

void note_file(const void* handle, const char* path) {
    note(handle, {"a file", path, 0, 0});
}

void note_function(CUfunction function, CUkernel kernel) {
    note(function, place_of(kernel));
}

void forget(const void* handle) {
    const std::lock_guard lock(mutex);
    places.erase(handle);
}

Place place_of(CUfunction function) {
    CUmodule module = nullptr;
    Place found;
    if (driver.cuFuncGetModule(&module, function) == CUDA_SUCCESS) found = find(module);
    if (found.path.empty()) found = find(function);
    return found.path.empty() ? place_of(reinterpret_cast<CUkernel>(function)) : found;
}

}  // namespace twice::code
