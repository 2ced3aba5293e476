// What phosd/engine/chunk_map/chunk_map.py calls. A board is a View; failures are null or -1 with
// errno set.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "view.h"

using phos::board::BlockRow;
using phos::board::KernelRow;
using phos::board::kGiveUp;
using phos::board::kLookBuckets;
using phos::board::kMaxDevices;
using phos::board::look_floor;
using phos::board::Phase;
using phos::board::SlabRow;
using phos::board::State;
using phos::board::View;

// `first_chunk` of the rows is ignored: they are given their chunks in turn.
PHOS_EXPORT View* phos_board_create(const BlockRow* blocks, uint32_t block_count,
                                    const SlabRow* slabs, uint32_t slab_count,
                                    const KernelRow* kernels, uint32_t kernel_count,
                                    int* descriptor) {
    std::vector<BlockRow> rows(blocks, blocks + block_count);
    uint32_t next = 0;
    for (BlockRow& row : rows) {
        row.first_chunk = next;
        if (__builtin_add_overflow(next, row.chunk_count, &next)) {
            errno = EOVERFLOW;
            return nullptr;
        }
    }
    return View::create(rows, slabs, slab_count, kernels, kernel_count, descriptor);
}

PHOS_EXPORT View* phos_board_open(int descriptor) {
    return View::open(descriptor);
}

PHOS_EXPORT void phos_board_close(View* view) {
    delete view;
}

PHOS_EXPORT uint32_t phos_board_chunk_count(View* view) {
    return view->chunk_count();
}

// The caller has checked that the chunks exist. Nobody is woken: nobody has the board yet.
PHOS_EXPORT void phos_board_mark_saved(View* view, const uint32_t* chunks, size_t count) {
    for (size_t i = 0; i < count; ++i)
        view->word(chunks[i]).store(State::saved, std::memory_order_relaxed);
}

// The words and the touched numbers of some chunks that exist.
PHOS_EXPORT void phos_board_read(View* view, uint32_t first, uint32_t count, uint32_t* words,
                                 uint32_t* touched) {
    for (uint32_t i = 0; i < count; ++i) {
        words[i] = view->word(first + i).load(std::memory_order_acquire);
        touched[i] = view->touched(first + i).load(std::memory_order_relaxed);
    }
}

PHOS_EXPORT void phos_board_statistics(View* view, uint64_t numbers[11]) {
    const auto& header = view->header();
    const auto read = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
    numbers[0] = read(header.submissions);
    numbers[1] = read(header.looked_ns);
    numbers[2] = read(header.shadowed_chunks);
    numbers[3] = read(header.waits);
    numbers[4] = read(header.waited_ns);
    numbers[5] = read(header.conservative);
    numbers[6] = read(header.touches);
    uint64_t counted = 0;
    for (const auto& looks : header.looks) counted += read(looks);
    // The middle of the bucket up to which there are so many of a thousand.
    const auto quantile = [&](uint64_t wanted) {
        uint64_t below = 0;
        uint32_t bucket = 0;
        while (bucket + 1 < kLookBuckets &&
               (below += read(header.looks[bucket])) * 1000 < counted * wanted)
            ++bucket;
        return (look_floor(bucket) + look_floor(bucket + 1)) / 2;
    };
    numbers[7] = quantile(500);
    numbers[8] = quantile(990);
    numbers[9] = quantile(999);
    numbers[10] = quantile(1000);
}

PHOS_EXPORT uint32_t phos_board_phase(View* view) {
    return view->header().phase.load(std::memory_order_acquire);
}

PHOS_EXPORT void phos_board_set_phase(View* view, uint32_t phase) {
    view->set_phase(static_cast<Phase>(phase));
}

// All that the hook asks for is answered: the engine has let go of everything.
PHOS_EXPORT void phos_board_answer(View* view) {
    for (auto& pressure : view->header().pressure)
        pressure.given.store(pressure.wanted.load(std::memory_order_acquire),
                             std::memory_order_release);
}

// What there is of no device that a board can tell of is not told of.
PHOS_EXPORT void phos_board_hold(View* view, uint32_t device, uint64_t bytes) {
    if (device < kMaxDevices) view->header().held[device].store(bytes, std::memory_order_release);
}

PHOS_EXPORT int phos_board_is_starving(View* view) {
    const auto& pressure = view->header().pressure;
    return std::any_of(std::begin(pressure), std::end(pressure), [](const auto& each) {
        return each.wanted.load(std::memory_order_acquire) >= kGiveUp;
    });
}

PHOS_EXPORT uint32_t phos_board_posted(View* view) {
    return view->header().posted.load(std::memory_order_acquire);
}

PHOS_EXPORT int phos_board_watch(View* view, uint32_t seen, int pidfd) {
    return static_cast<int>(view->watch(seen, pidfd));
}

PHOS_EXPORT void phos_board_stop_watching(View* view) {
    view->stop_watching();
}

// `ids` has room for kFreedRing. The number of ids, or -1 when some were lost.
PHOS_EXPORT int phos_board_freed(View* view, uint64_t* ids) {
    std::vector<uint64_t> found;
    if (!view->freed(found)) return -1;
    std::copy(found.begin(), found.end(), ids);
    return static_cast<int>(found.size());
}

PHOS_EXPORT void phos_board_freed_taken(View* view) {
    view->freed_taken();
}
