#include "base/descriptors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>

namespace phos::descriptors {
namespace {
// A kept descriptor. One for which there is no slot is kept all the same, but inherited.
struct Slot {
    std::atomic<int> number;   // the descriptor + 1, or 0
    std::atomic<ino_t> inode;  // of a socket or a pipe, where it is unique; otherwise 0
};
Slot slots[8192];

// The inode of a number that is closed, also of one that the program closed before it was kept.
constexpr ino_t kClosed = ~ino_t{0};

// Returns the inode of a socket or a pipe, otherwise 0. Avoids fstat(), which the thread sanitizer
// counts as a use: the program may own the number now.
ino_t inode_of(int descriptor) {
    struct stat info{};
    if (fstatat(descriptor, "", &info, AT_EMPTY_PATH) != 0) return kClosed;
    return S_ISSOCK(info.st_mode) || S_ISFIFO(info.st_mode) ? info.st_ino : 0;
}

Slot* slot_of(int descriptor) {
    for (Slot& slot : slots)
        if (slot.number.load() == descriptor + 1) return &slot;
    return nullptr;
}

Slot* take_slot(int descriptor) {
    for (Slot& slot : slots) {
        int empty = 0;
        if (slot.number.compare_exchange_strong(empty, descriptor + 1)) return &slot;
    }
    return nullptr;
}

int remember(int descriptor, ino_t inode) {
    Slot* slot = slot_of(descriptor);  // of a descriptor that the program has closed
    if (!slot) slot = take_slot(descriptor);
    if (slot) slot->inode.store(inode);
    return descriptor;
}

bool is_unchanged(const Slot& slot, int descriptor) {
    const ino_t inode = slot.inode.load();
    return !inode || (inode != kClosed && inode == inode_of(descriptor));
}
}  // namespace

int keep(int descriptor) {
    if (descriptor < 0) return descriptor;
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    return remember(descriptor, inode_of(descriptor));
}

// Leaves the flags alone: its maker has asked for close-on-exec, and the number may be another's.
int keep_socket(int descriptor) {
    if (descriptor < 0) return descriptor;
    const ino_t inode = inode_of(descriptor);
    return remember(descriptor, inode ? inode : kClosed);
}

bool is_ours(int descriptor) {
    const Slot* const slot = slot_of(descriptor);
    return slot ? is_unchanged(*slot, descriptor) : fcntl(descriptor, F_GETFD) >= 0;
}

void release(int descriptor) {
    Slot* const slot = slot_of(descriptor);
    const bool ours = !slot || is_unchanged(*slot, descriptor);
    if (slot) {  // before the number is reused; the inode first, since the slot is free then
        slot->inode.store(0);
        slot->number.store(0);
    }
    if (ours) close(descriptor);
}

unsigned count() {
    unsigned kept = 0;
    for (const Slot& slot : slots) kept += slot.number.load() != 0;
    return kept;
}

void close_all_in_child() {
    for (Slot& slot : slots) {
        const int value = slot.number.exchange(0);
        if (value && is_unchanged(slot, value - 1)) close(value - 1);
        slot.inode.store(0);
    }
}

}  // namespace phos::descriptors
