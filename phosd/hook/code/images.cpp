#include "code/images.h"

#include <link.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace phos::images {
namespace {

// Copies are for code that is compiled at run time: a module of Triton has some 50 kB.
constexpr uint64_t kMaxCopy = 8u << 20;
constexpr uint64_t kMaxCopies = 64u << 20;
constexpr size_t kMaxImages = 1u << 16;

struct Known {
    std::mutex mutex;
    std::vector<Image> all;
    std::unordered_set<uint64_t> hashes;
    uint64_t copied = 0;
};

// Never destroyed: a program may load modules while it exits.
Known& known() {
    static Known* const images = new Known;
    return *images;
}

struct Search {
    uint64_t begin;
    uint64_t end;
};

// Whether the bytes are part of a loaded object. dladdr() would look through all its symbols.
bool in_loaded_object(const void* bytes, uint64_t size) {
    const auto address = reinterpret_cast<uint64_t>(bytes);
    Search search{address, address + size};
    const auto covers = [](dl_phdr_info* object, size_t, void* data) {
        const auto* wanted = static_cast<const Search*>(data);
        for (size_t i = 0; i < object->dlpi_phnum; ++i) {
            const auto& segment = object->dlpi_phdr[i];
            const uint64_t begin = object->dlpi_addr + segment.p_vaddr;
            if (segment.p_type == PT_LOAD && begin <= wanted->begin &&
                wanted->end <= begin + segment.p_memsz)
                return 1;
        }
        return 0;
    };
    return dl_iterate_phdr(covers, &search) != 0;
}

// Returns a copy of an image, or null if there is no room for one.
void* copy_of(const void* bytes, uint64_t size, uint64_t* copied) {
    if (size > kMaxCopy || *copied + size > kMaxCopies) return nullptr;
    void* copy = std::malloc(size);
    if (!copy) return nullptr;
    *copied += size;
    return std::memcpy(copy, bytes, size);
}

bool is_new(Known* images, uint64_t hash) {
    return hash && images->all.size() < kMaxImages && images->hashes.insert(hash).second;
}

}  // namespace

void note(uint64_t hash, const void* bytes, uint64_t size) {
    const bool stays = in_loaded_object(bytes, size);
    Known& images = known();
    const std::lock_guard lock(images.mutex);
    if (!is_new(&images, hash)) return;
    const void* kept = stays ? bytes : copy_of(bytes, size, &images.copied);
    const wire::Held held = stays  ? wire::Held::in_object
                            : kept ? wire::Held::in_copy
                                   : wire::Held::not_kept;
    images.all.push_back({hash, reinterpret_cast<uint64_t>(kept), size, held, {}});
}

void note_file(uint64_t hash, const char* path, uint64_t size) {
    Known& images = known();
    const std::lock_guard lock(images.mutex);
    if (is_new(&images, hash)) images.all.push_back({hash, 0, size, wire::Held::in_file, path});
}

std::vector<Image> after(size_t first) {
    Known& images = known();
    const std::lock_guard lock(images.mutex);
    if (first >= images.all.size()) return {};
    return {images.all.begin() + static_cast<ptrdiff_t>(first), images.all.end()};
}

}  // namespace phos::images
