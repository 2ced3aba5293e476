#include "descriptors.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>

namespace phos::descriptors {
namespace {
// A slot holds a descriptor + 1, or 0. What finds no slot is kept all the same, and inherited.
std::atomic<int> slots[8192];
}  // namespace

int keep(int descriptor) {
    if (descriptor < 0) return descriptor;
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    for (std::atomic<int>& slot : slots) {
        int empty = 0;
        if (slot.compare_exchange_strong(empty, descriptor + 1)) break;
    }
    return descriptor;
}

void forget(int descriptor) {
    for (std::atomic<int>& slot : slots) {
        int value = descriptor + 1;
        if (slot.compare_exchange_strong(value, 0)) break;
    }
}

void release(int descriptor) {
    forget(descriptor);
    close(descriptor);
}

unsigned count() {
    unsigned kept = 0;
    for (const std::atomic<int>& slot : slots) kept += slot.load() != 0;
    return kept;
}

void close_all_in_child() {
    for (std::atomic<int>& slot : slots)
        if (const int value = slot.exchange(0)) close(value - 1);
}

}  // namespace phos::descriptors
