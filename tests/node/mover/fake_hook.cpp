// The hook's side of a board, step by step: what tests need to play a program. It reads the board
// by the header alone, so that it would notice if the engine laid one out differently.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

#include "../../../phosd/hook/protocol/chunk_map.h"

using namespace phos::board;

namespace {

template <typename Row>
Row* rows(Header* board, uint64_t at) {
    return reinterpret_cast<Row*>(reinterpret_cast<char*>(board) + at);
}

std::atomic<uint32_t>& word(Header* board, uint32_t chunk) {
    return rows<std::atomic<uint32_t>>(board, board->chunks_at)[chunk];
}

void post(Header* board) {
    board->posted.fetch_add(1);
    syscall(SYS_futex, &board->posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

template <typename Done>
bool wait_until(Header* board, double seconds, Done done) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double end = static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec + seconds;
    while (true) {
        const uint32_t seen = board->progressed.load();
        if (done()) return true;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec > end) return false;
        const timespec pause = {0, 100'000'000};
        syscall(SYS_futex, &board->progressed, FUTEX_WAIT, seen, &pause, nullptr, 0);
    }
}

}  // namespace

extern "C" {

Header* hook_open(int descriptor) {
    struct stat status;
    if (fstat(descriptor, &status) != 0) return nullptr;
    void* memory = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE,
                        MAP_SHARED, descriptor, 0);
    auto* board = static_cast<Header*>(memory);
    const bool good = memory != MAP_FAILED && board->magic == kMagic &&
                      board->version == kVersion &&
                      board->size == static_cast<uint64_t>(status.st_size);
    return good ? board : nullptr;
}

void hook_close(Header* board) {
    munmap(board, board->size);
}

int64_t hook_first_chunk(Header* board, uint64_t id, uint32_t* count) {
    const auto* blocks = rows<BlockRow>(board, board->blocks_at);
    for (uint32_t i = 0; i < board->block_count; ++i) {
        if (blocks[i].id != id) continue;
        *count = blocks[i].chunk_count;
        return blocks[i].first_chunk;
    }
    return -1;
}

void hook_counts(Header* board, uint32_t counts[5]) {
    counts[0] = board->block_count;
    counts[1] = board->chunk_count;
    counts[2] = board->slab_count;
    counts[3] = board->slot_count;
    counts[4] = board->kernel_count;
}

void hook_slab(Header* board, uint32_t row, int32_t* device, uint32_t* slots) {
    *device = rows<SlabRow>(board, board->slabs_at)[row].device;
    *slots = rows<SlabRow>(board, board->slabs_at)[row].slots;
}

void hook_kernel(Header* board, uint32_t row, uint64_t* numbers) {
    const auto& kernel = rows<KernelRow>(board, board->kernels_at)[row];
    numbers[0] = kernel.name_hash;
    numbers[1] = kernel.module;
    numbers[2] = kernel.flags;
    numbers[3] = kernel.written;
}

uint32_t hook_word(Header* board, uint32_t chunk) {
    return word(board, chunk).load();
}

void hook_set_word(Header* board, uint32_t chunk, uint32_t value) {
    word(board, chunk).store(value);
}

int hook_begin_shadow(Header* board, uint32_t chunk, uint32_t slot) {
    uint32_t seen = pending;
    const uint32_t wanted = shadowing | slot << kSlotShift;
    return word(board, chunk).compare_exchange_strong(seen, wanted);
}

int hook_end_shadow(Header* board, uint32_t chunk) {
    uint32_t seen = word(board, chunk).load();
    if ((seen & kStateMask) != shadowing) return 0;
    const uint32_t made = (seen & ~kStateMask) | shadowed;
    return word(board, chunk).compare_exchange_strong(seen, made);
}

void hook_touch(Header* board, uint32_t chunk) {
    rows<std::atomic<uint32_t>>(board, board->touched_at)[chunk].store(++board->touches);
}

void hook_urge(Header* board, uint32_t chunk) {
    word(board, chunk).fetch_or(kUrgent);
    post(board);
}

int hook_await_saved(Header* board, uint32_t chunk, double seconds) {
    const auto safe = [&] {
        return (word(board, chunk).load() & kStateMask) == saved || board->phase.load() == aborted;
    };
    return wait_until(board, seconds, safe);
}

void hook_free(Header* board, uint64_t id) {
    const uint64_t n = board->freed_posted.load();
    board->freed[n % kFreedRing].store(id);
    board->freed_posted.store(n + 1);
    post(board);
}

int hook_await_taken(Header* board, double seconds) {
    const auto taken = [&] { return board->freed_taken.load() == board->freed_posted.load(); };
    return wait_until(board, seconds, taken);
}

void hook_press(Header* board, uint32_t device, uint32_t level, int abort) {
    board->pressure[device].wanted.store(level);
    if (abort) board->phase.store(aborted);
    post(board);
}

int hook_await_relief(Header* board, uint32_t device, double seconds) {
    const auto given = [&] {
        return board->pressure[device].given.load() >= board->pressure[device].wanted.load();
    };
    return wait_until(board, seconds, given);
}

void hook_release_slab(Header* board, uint32_t row) {
    rows<SlabRow>(board, board->slabs_at)[row].released.store(1);
}

uint32_t hook_phase(Header* board) {
    return board->phase.load();
}

void hook_look(Header* board, uint64_t nanoseconds) {
    ++board->looks[look_bucket(nanoseconds)];
}

void hook_count(Header* board, const uint64_t numbers[6]) {
    board->submissions = numbers[0];
    board->looked_ns = numbers[1];
    board->shadowed_chunks = numbers[2];
    board->waits = numbers[3];
    board->waited_ns = numbers[4];
    board->conservative = numbers[5];
}
}
