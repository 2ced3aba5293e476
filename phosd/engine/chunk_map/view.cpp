// Making, opening and watching a board.
#include "view.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>

namespace phos::board {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr uint64_t kLine = 64;

uint64_t line_up(uint64_t offset) {
    return (offset + kLine - 1) / kLine * kLine;
}

std::byte* map(int descriptor, size_t size) {
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

// The word is in memory that other processes have mapped, so this is no private futex.
void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

template <typename Row>
Row* rows(std::byte* memory, size_t size, uint64_t at, uint64_t count) {
    const bool inside = at % alignof(Row) == 0 && at >= sizeof(Header) && at <= size &&
                        count <= (size - at) / sizeof(Row);
    return inside ? reinterpret_cast<Row*>(memory + at) : nullptr;
}

}  // namespace

View* View::create(const std::vector<BlockRow>& blocks, const SlabRow* slabs, uint32_t slab_count,
                   const KernelRow* kernels, uint32_t kernel_count, int* descriptor) {
    const uint32_t chunks =
        blocks.empty() ? 0 : blocks.back().first_chunk + blocks.back().chunk_count;
    Header plan{};
    plan.magic = kMagic;
    plan.version = kVersion;
    plan.block_count = static_cast<uint32_t>(blocks.size());
    plan.chunk_count = chunks;
    plan.slab_count = slab_count;
    for (uint32_t i = 0; i < slab_count; ++i) plan.slot_count += slabs[i].slots;
    plan.kernel_count = kernel_count;
    plan.blocks_at = line_up(sizeof(Header));
    plan.chunks_at = line_up(plan.blocks_at + sizeof(BlockRow) * blocks.size());
    plan.touched_at = line_up(plan.chunks_at + sizeof(uint32_t) * chunks);
    plan.slabs_at = line_up(plan.touched_at + sizeof(uint32_t) * chunks);
    plan.kernels_at = line_up(plan.slabs_at + sizeof(SlabRow) * slab_count);
    plan.size = line_up(plan.kernels_at + sizeof(KernelRow) * kernel_count);

    const int fd = memfd_create("phos-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return nullptr;
    std::byte* memory = nullptr;
    if (ftruncate(fd, static_cast<off_t>(plan.size)) == 0 && fcntl(fd, F_ADD_SEALS, kSeals) == 0)
        memory = map(fd, plan.size);
    if (memory == nullptr) {
        const int error = errno;
        close(fd);
        errno = error;
        return nullptr;
    }
    // What is not copied is zero, as a new file is: every chunk pending, phase armed.
    std::memcpy(memory, &plan, offsetof(Header, phase));
    const auto put = [memory](uint64_t at, const void* from, size_t size) {
        if (size != 0) std::memcpy(memory + at, from, size);
    };
    put(plan.blocks_at, blocks.data(), sizeof(BlockRow) * blocks.size());
    put(plan.slabs_at, slabs, sizeof(SlabRow) * slab_count);
    put(plan.kernels_at, kernels, sizeof(KernelRow) * kernel_count);
    auto* view = new View(memory, plan.size);
    view->adopt_layout();
    *descriptor = fd;
    return view;
}

View* View::open(int descriptor) {
    struct stat status;
    const int seals = fcntl(descriptor, F_GET_SEALS);
    if (seals < 0 || fstat(descriptor, &status) != 0) return nullptr;
    const auto size = static_cast<size_t>(status.st_size);
    if ((seals & F_SEAL_SHRINK) == 0 || size < sizeof(Header)) {
        errno = EBADMSG;
        return nullptr;
    }
    std::byte* memory = map(descriptor, size);
    if (memory == nullptr) return nullptr;
    auto view = std::unique_ptr<View>(new View(memory, size));
    if (!view->adopt_layout()) {
        errno = EBADMSG;
        return nullptr;
    }
    return view.release();
}

View::~View() {
    munmap(memory_, size_);
}

bool View::adopt_layout() {
    const Header& found = header();
    if (found.magic != kMagic || found.version != kVersion || found.size > size_) return false;
    block_count_ = found.block_count;
    chunk_count_ = found.chunk_count;
    slab_count_ = found.slab_count;
    blocks_ = rows<BlockRow>(memory_, size_, found.blocks_at, block_count_);
    words_ = rows<std::atomic<uint32_t>>(memory_, size_, found.chunks_at, chunk_count_);
    touched_ = rows<std::atomic<uint32_t>>(memory_, size_, found.touched_at, chunk_count_);
    slabs_ = rows<SlabRow>(memory_, size_, found.slabs_at, slab_count_);
    return blocks_ != nullptr && words_ != nullptr && touched_ != nullptr && slabs_ != nullptr;
}

void View::progressed() {
    header().progressed.fetch_add(1, std::memory_order_release);
    wake_all(header().progressed);
}

void View::set_phase(Phase phase) {
    header().phase.store(phase, std::memory_order_release);
    progressed();
    header().posted.fetch_add(1, std::memory_order_release);
    wake_all(header().posted);
}

bool View::wait_posted(uint32_t seen, double seconds) {
    timespec patience;
    patience.tv_sec = static_cast<time_t>(seconds);
    patience.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
    std::atomic<uint32_t>& posted = header().posted;
    if (posted.load(std::memory_order_acquire) == seen)
        syscall(SYS_futex, &posted, FUTEX_WAIT, seen, &patience, nullptr, 0);
    return posted.load(std::memory_order_acquire) != seen;
}

View::Event View::watch(uint32_t seen, int pidfd) {
    constexpr double kLook = 0.1;  // seconds between looks at what does not wake us
    while (!stopped_.load(std::memory_order_relaxed)) {
        const bool posted = wait_posted(seen, kLook);
        pollfd process{pidfd, POLLIN, 0};
        if (poll(&process, 1, 0) == 1) return Event::ended;
        if (posted) return Event::posted;
    }
    return Event::stopped;
}

bool View::freed(std::vector<uint64_t>& ids) {
    const Header& at = header();
    const uint64_t posted = at.freed_posted.load(std::memory_order_acquire);
    const uint64_t from = freed_seen_;
    freed_seen_ = posted;
    if (posted - from > kFreedRing) return false;
    for (uint64_t n = from; n != posted; ++n)
        ids.push_back(at.freed[n % kFreedRing].load(std::memory_order_acquire));
    // One more may be in the writing: its id replaces the oldest before it is counted.
    return at.freed_posted.load(std::memory_order_relaxed) - from < kFreedRing || ids.empty();
}

void View::freed_taken() {
    header().freed_taken.store(freed_seen_, std::memory_order_release);
    progressed();
}

}  // namespace phos::board
