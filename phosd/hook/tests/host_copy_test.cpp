// While the process is parked, memory that is to be populated comes in huge pages and complete; at
// every other time, and every other mapping, is what the kernel gives.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "check.h"

using namespace phos;
using namespace phos::test;

namespace {

constexpr size_t kSize = (100 << 20) + 12288;  // several shares, and no whole number of huge pages
constexpr int kPopulated = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
constexpr int kReadWrite = PROT_READ | PROT_WRITE;

struct Seen {
    size_t resident = 0;  // bytes
    bool advised = false;
};

// What the kernel says of the mappings between two addresses.
Seen look(const void* begin, size_t size) {
    Seen seen;
    std::ifstream file("/proc/self/smaps");
    std::string line;
    bool inside = false;
    const auto from = reinterpret_cast<uintptr_t>(begin);
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string word;
        words >> word;
        uintptr_t low = 0;
        uintptr_t high = 0;
        if (std::sscanf(word.c_str(), "%lx-%lx", &low, &high) == 2) {
            inside = low < from + size && high > from;
        } else if (inside && word == "Rss:") {
            size_t kilobytes = 0;
            words >> kilobytes;
            seen.resident += kilobytes << 10;
        } else if (inside && word == "VmFlags:") {
            while (words >> word) seen.advised |= word == "hg";
        }
    }
    return seen;
}

bool huge_pages_exist() {
    return access("/sys/kernel/mm/transparent_hugepage/enabled", F_OK) == 0;
}

// The kernel joins neighbours that are alike, so each mapping has none.
Seen seen_of(void* (*map)(void*, size_t, int, int, int, off_t), size_t size, int protection,
             int flags) {
    const size_t page = static_cast<size_t>(getpagesize());
    auto* room = static_cast<char*>(
        mmap(nullptr, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(room != MAP_FAILED);
    CHECK(munmap(room + page, size) == 0);
    errno = 77;
    void* const found = map(room + page, size, protection, flags, -1, 0);
    CHECK(found == room + page && errno == 77);
    if (protection & PROT_WRITE) {
        auto* bytes = static_cast<char*>(found);
        for (size_t at = 0; at < size; at += 1 << 20) CHECK(bytes[at] == 0);
    }
    const Seen seen = look(found, size);
    if (protection & PROT_WRITE) std::memset(found, 1, size);
    CHECK(munmap(room, size + 2 * page) == 0);
    return seen;
}

void while_parked(void* (*map)(void*, size_t, int, int, int, off_t)) {
    const Seen seen = seen_of(map, kSize, kReadWrite, kPopulated);
    CHECK(seen.advised == huge_pages_exist());
    CHECK(seen.resident >= kSize);
    CHECK(!seen_of(map, kSize, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS).advised);
    CHECK(!seen_of(map, kSize, PROT_READ, kPopulated).advised);
    CHECK(!seen_of(map, 1 << 20, kReadWrite, kPopulated).advised);
    CHECK(!seen_of(map, kSize, kReadWrite, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE).advised);
    errno = 0;
    CHECK(map(nullptr, ~size_t{0} >> 2, kReadWrite, kPopulated, -1, 0) == MAP_FAILED);
    CHECK(errno == ENOMEM);
}

void while_running() {
    const Seen seen = seen_of(mmap, kSize, kReadWrite, kPopulated);
    CHECK(!seen.advised && seen.resident >= kSize);
}

}  // namespace

int main(int count, char**) {
    const bool off = count > 1;  // as the environment says: PHOS_HUGE_PAGES
    start_cuda();
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 1 << 20));
    Client client(getpid());
    while_running();
    CHECK(client.close_gate(5000));
    while_running();
    const auto held = client.export_all();
    client.park();
    if (off) {
        while_running();
    } else {
        while_parked(mmap);
        while_parked(mmap64);
    }
    client.unpark(held);
    while_running();
    client.open_gate();
    while_running();
    std::puts("ok");
}
