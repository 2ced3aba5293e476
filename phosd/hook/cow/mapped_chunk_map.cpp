#include "cow/mapped_chunk_map.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

namespace phos::cow {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr uint64_t kMaxSize = 1ull << 30;
constexpr long kSlice = 100'000'000;  // nanoseconds of one wait

void wake(Word& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Returns the table of `count` rows at an offset; null if it is not inside the board.
template <class Row>
Row* table(board::Header* header, uint64_t size, uint64_t at, uint32_t count) {
    static_assert(alignof(Row) <= 8);
    if (at < sizeof *header || at % 8 || at > size || count > (size - at) / sizeof(Row))
        return nullptr;
    return reinterpret_cast<Row*>(reinterpret_cast<char*>(header) + at);
}

}  // namespace

std::string MappedChunkMap::map(int descriptor) {
    struct stat info{};
    const int seals = fcntl(descriptor, F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals)
        return "it is no memfd that is sealed against resizing";
    if (fstat(descriptor, &info) != 0) return std::strerror(errno);
    size = static_cast<uint64_t>(info.st_size);
    if (size < sizeof *header || size > kMaxSize) return "its size is out of bounds";
    void* const at =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
    if (at == MAP_FAILED) return std::strerror(errno);
    madvise(at, size, MADV_DONTFORK);  // not for a forked child
    header = static_cast<board::Header*>(at);
    block_count = header->block_count;
    chunk_count = header->chunk_count;
    slab_count = header->slab_count;
    slot_count = header->slot_count;
    kernel_count = header->kernel_count;
    blocks = table<const board::BlockRow>(header, size, header->blocks_at, block_count);
    words = table<Word>(header, size, header->chunks_at, chunk_count);
    touched = table<Word>(header, size, header->touched_at, chunk_count);
    slabs = table<board::SlabRow>(header, size, header->slabs_at, slab_count);
    kernels = table<const board::KernelRow>(header, size, header->kernels_at, kernel_count);
    std::string wrong;
    if (header->magic != board::kMagic || header->version != board::kVersion)
        wrong = "it is of another version";
    else if (header->size != size || !blocks || !words || !touched || !slabs || !kernels)
        wrong = "a table lies outside of it";
    if (!wrong.empty()) unmap();
    return wrong;
}

void MappedChunkMap::unmap() {
    if (header) munmap(header, size);
    *this = {};
}

void MappedChunkMap::abort() {
    uint32_t phase = board::armed;
    if (!header->phase.compare_exchange_strong(phase, board::aborted)) return;
    post();
    wake_waiters();
}

void MappedChunkMap::post() {
    header->posted.fetch_add(1, std::memory_order_release);
    wake(header->posted);
}

void MappedChunkMap::wake_waiters() {
    header->progressed.fetch_add(1, std::memory_order_release);
    wake(header->progressed);
}

void MappedChunkMap::wait_progress(uint32_t seen) const {
    const timespec slice{0, kSlice};
    syscall(SYS_futex, &header->progressed, FUTEX_WAIT, seen, &slice, nullptr, 0);
}

bool MappedChunkMap::ask_urgently(uint32_t chunk) {
    uint32_t word = words[chunk].load(std::memory_order_acquire);
    while (state_of(word) == board::pending || state_of(word) == board::copying)
        if ((word & board::kUrgent) ||
            words[chunk].compare_exchange_weak(word, word | board::kUrgent))
            return true;
    return false;
}

}  // namespace phos::cow
