// Populate the driver checkpoint's memory faster. The driver maps memory for its copy of the
// contexts with MAP_POPULATE, and one thread allocates it page by page (0.14 of 0.29 s for 0.6 GB
// on an H200). While the process is parked, such a mapping is populated by several threads with
// huge pages. CRIU, which dumps it, and the driver's restore, which frees it, gain from huge pages,
// too. All other mappings are passed on unchanged; PHOS_HUGE_PAGES=off disables this.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "base/process.h"
#include "gate/gate.h"

#ifndef MADV_POPULATE_WRITE  // since Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace phos::mmap_populate {
namespace {

constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kLeast = 2 * kHugePage;
constexpr size_t kShare = 16 * kHugePage;  // minimum bytes per thread
constexpr size_t kMostThreads = 16;

// A sanitizer maps memory before its own is set up.
#define PHOS_NOT_SANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

using Map = void* (*)(void*, size_t, int, int, int, off64_t);
Map next = nullptr;  // of another preloaded library, or libc
bool wanted = true;

struct Share {
    char* begin;
    size_t size;
};

// Rounds up, so that no huge page belongs to two shares.
char* up_to_page(char* at) {
    return at + -reinterpret_cast<uintptr_t>(at) % kHugePage;
}

// Populates a share. Pages that are not available now are allocated when touched, as with
// MAP_POPULATE.
void* populate_share(void* argument) {
    const auto* share = static_cast<const Share*>(argument);
    madvise(share->begin, share->size, MADV_POPULATE_WRITE);
    return nullptr;
}

void populate(char* begin, size_t size) {
    const KeepErrno keep;
    madvise(begin, size, MADV_HUGEPAGE);
    const long processors = std::max(sysconf(_SC_NPROCESSORS_ONLN), 1l);
    const size_t most = std::min<size_t>(kMostThreads, static_cast<size_t>(processors));
    const size_t count = std::clamp<size_t>(size / kShare, 1, most);
    Share shares[kMostThreads];
    pthread_t threads[kMostThreads];
    bool runs[kMostThreads] = {};
    for (size_t i = 0; i < count; ++i) {
        char* const from = i ? up_to_page(begin + size / count * i) : begin;
        char* const to = i + 1 < count ? up_to_page(begin + size / count * (i + 1)) : begin + size;
        shares[i] = {from, static_cast<size_t>(to - from)};
    }
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's signals are not delivered to them
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    for (size_t i = 1; i < count; ++i)
        runs[i] = pthread_create(&threads[i], &attributes, populate_share, &shares[i]) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    for (size_t i = 0; i < count; ++i) {
        if (runs[i])
            pthread_join(threads[i], nullptr);
        else
            populate_share(&shares[i]);
    }
}

PHOS_NOT_SANITIZED inline void* map(void* address, size_t size, int protection, int flags,
                                    int descriptor, off64_t offset) {
    const bool ours = flags == kFlags && size >= kLeast && (protection & PROT_WRITE) &&
                      __builtin_expect(gate::parked(), 0) && wanted;
    if (ours) flags &= ~MAP_POPULATE;
    const Map real = __atomic_load_n(&next, __ATOMIC_RELAXED);
    void* const found = real ? real(address, size, protection, flags, descriptor, offset)
                             : reinterpret_cast<void*>(syscall(SYS_mmap, address, size, protection,
                                                               flags, descriptor, offset));
    if (ours && found != MAP_FAILED) populate(static_cast<char*>(found), size);
    return found;
}

__attribute__((constructor)) void begin() {
    const char* value = std::getenv("PHOS_HUGE_PAGES");
    wanted = !value || std::strcmp(value, "off") != 0;
    const auto found = reinterpret_cast<Map>(dlvsym(RTLD_NEXT, "mmap64", "GLIBC_2.2.5"));
    __atomic_store_n(&next, found, __ATOMIC_RELAXED);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) PHOS_NOT_SANITIZED void* mmap64(void* address, size_t size,
                                                                       int protection, int flags,
                                                                       int descriptor,
                                                                       off64_t offset) {
    return map(address, size, protection, flags, descriptor, offset);
}

__attribute__((visibility("default"), alias("mmap64"))) void* mmap(void*, size_t, int, int, int,
                                                                   off_t);

}  // extern "C"

}  // namespace phos::mmap_populate
