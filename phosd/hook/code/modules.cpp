#include "code/modules.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "code/images.h"

namespace phos::modules {
namespace {

// A fat binary may have hundreds of megabytes that are never read: its head, tail and size identify
// it well enough. What was compiled at run time is smaller, and may differ from its like in a
// number in the middle: of that all bytes count.
constexpr size_t kHead = 8 << 10;
constexpr size_t kTail = 4 << 10;
constexpr uint64_t kWhole = 8u << 20;

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
// By handle: of modules, libraries, and functions made from a library's kernels. Entries of
// functions stay; for a module's function the module is looked up first.
std::unordered_map<const void*, uint64_t> hashes;

uint64_t mix(uint64_t hash, const unsigned char* bytes, size_t size) {
    uint64_t word = 0;
    for (size_t at = 0; at < size; at += sizeof word) {
        word = 0;
        std::memcpy(&word, bytes + at, std::min(size - at, sizeof word));
        hash = (hash ^ word) * 0x9E37'79B9'7F4A'7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

// Adler-32 of what is between head and tail, as zlib has it.
struct Middle {
    uint32_t low = 1;
    uint32_t high = 0;

    void add(const unsigned char* bytes, size_t size) {
        constexpr uint32_t kPrime = 65521;
        constexpr size_t kMost = 5552;  // before `high` may overflow
        for (size_t at = 0; at < size;) {
            const size_t end = std::min(size, at + kMost);
            for (; at < end; ++at) high += low += bytes[at];
            low %= kPrime;
            high %= kPrime;
        }
    }
    bool add_file(int file, uint64_t begin, uint64_t end) {
        unsigned char part[16 << 10];
        while (begin < end) {
            const size_t most = std::min<uint64_t>(sizeof part, end - begin);
            const ssize_t got = pread(file, part, most, static_cast<off_t>(begin));
            if (got <= 0) return false;
            add(part, static_cast<size_t>(got));
            begin += static_cast<uint64_t>(got);
        }
        return true;
    }
    uint64_t sum() const { return uint64_t{high} << 16 | low; }
};

// `middle` of an image of at most kWhole bytes.
uint64_t hash_of_parts(const unsigned char* head, size_t head_size, const unsigned char* tail,
                       size_t tail_size, uint64_t size, const Middle& middle) {
    uint64_t hash = mix(mix(size, head, head_size), tail, tail_size);
    const uint64_t sum = middle.sum();
    if (size <= kWhole) hash = mix(hash, reinterpret_cast<const unsigned char*>(&sum), sizeof sum);
    return hash ? hash : 1;
}

uint64_t find(const void* handle) {
    const std::lock_guard lock(mutex);
    const auto found = hashes.find(handle);
    return found == hashes.end() ? 0 : found->second;
}

struct Bytes {
    const unsigned char* first;
    uint64_t size;  // 0: it is nothing that is known
};

Bytes bytes_of(const void* image) {
    uint32_t magic = 0;
    std::memcpy(&magic, image, sizeof magic);
    if (magic == kFatWrapper) {
        FatWrapper wrapper;
        std::memcpy(&wrapper, image, sizeof wrapper);
        image = wrapper.data;
        if (!image) return {nullptr, 0};
        std::memcpy(&magic, image, sizeof magic);
    }
    const auto* bytes = static_cast<const unsigned char*>(image);
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

// Returns the path that an open file has; empty if it has none any more.
std::string path_of(int file) {
    char link[32];
    char path[PATH_MAX];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path);
    return length > 0 ? std::string(path, static_cast<size_t>(length)) : std::string();
}

}  // namespace

void note_image(const void* handle, const void* image) {
    const auto [bytes, size] = bytes_of(image);
    uint64_t hash = 0;
    if (size) {
        const size_t head = std::min<uint64_t>(size, kHead);
        const size_t tail = std::min<uint64_t>(size - head, kTail);
        Middle middle;
        if (size <= kWhole) middle.add(bytes + head, size - head - tail);
        hash = hash_of_parts(bytes, head, bytes + size - tail, tail, size, middle);
        images::note(hash, bytes, size);
    }
    note(handle, hash);
}

void note_file(const void* handle, const char* path) {
    uint64_t hash = 0;
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status{};
    unsigned char head[kHead];
    unsigned char tail[kTail];
    if (file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode)) {
        const auto size = static_cast<uint64_t>(status.st_size);
        const ssize_t in_head = pread(file, head, sizeof head, 0);
        const size_t rest = in_head > 0 ? size - std::min<uint64_t>(size, kHead) : 0;
        const size_t wanted = std::min<uint64_t>(rest, kTail);
        const ssize_t in_tail = pread(file, tail, wanted, static_cast<off_t>(size - wanted));
        Middle middle;
        const bool whole =
            in_head > 0 && in_tail >= 0 &&
            (size > kWhole || middle.add_file(file, static_cast<uint64_t>(in_head), size - wanted));
        if (whole) {
            hash = hash_of_parts(head, static_cast<size_t>(in_head), tail,
                                 static_cast<size_t>(in_tail), size, middle);
            images::note_file(hash, path_of(file).c_str(), size);
        }
    }
    if (file >= 0) close(file);
    note(handle, hash);
}

void note(const void* handle, uint64_t hash) {
    const std::lock_guard lock(mutex);
    hashes[handle] = hash;
}

void forget(const void* handle) {
    const std::lock_guard lock(mutex);
    hashes.erase(handle);
}

uint64_t hash_of(CUfunction function) {
    CUmodule module = nullptr;
    uint64_t hash = 0;
    if (driver.cuFuncGetModule && driver.cuFuncGetModule(&module, function) == CUDA_SUCCESS)
        hash = find(module);
    return hash ? hash : find(function);
}

uint64_t hash_of(CUkernel kernel) {
    CUlibrary library = nullptr;
    if (!driver.cuKernelGetLibrary || driver.cuKernelGetLibrary(&library, kernel) != CUDA_SUCCESS)
        return 0;
    return find(library);
}

}  // namespace phos::modules
