#include "code/kernels.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>

#include "code/modules.h"

namespace phos::kernels {
namespace {

// What a function's handle referred to at this `generation` of handles. Never freed.
struct Entry {
    const CUfunction function;
    std::atomic<uint64_t> generation;
    std::atomic<Kernel*> kernel;
    Entry* next;
};

constexpr size_t kBuckets = 4096;  // a power of two
std::atomic<Entry*> buckets[kBuckets];
std::atomic<uint64_t> handles{1};  // the generation of all handles
std::atomic<uint64_t> generations{0};
std::atomic<uint64_t> first_launches{0};

using Layout = std::vector<std::pair<uint32_t, uint32_t>>;
using Identity = std::tuple<std::string, uint64_t, bool, Layout>;

std::mutex mutex;  // guards what follows, and changes of the buckets
std::map<Identity, std::unique_ptr<Kernel>> known;
std::vector<board::KernelRow> rows;  // by name

std::atomic<Entry*>& bucket_of(CUfunction function) {
    const auto mixed = reinterpret_cast<uintptr_t>(function) * 0x9E37'79B9'7F4A'7C15u;
    return buckets[mixed >> 52];
}

uint64_t name_hash(const std::string& name) {
    uint64_t hash = 0xCBF2'9CE4'8422'2325u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100'0000'01B3u;
    return hash;
}

struct ByName {
    using Row = board::KernelRow;
    bool operator()(const Row& row, uint64_t hash) const { return row.name_hash < hash; }
    bool operator()(uint64_t hash, const Row& row) const { return hash < row.name_hash; }
    bool operator()(const Row& a, const Row& b) const { return a.name_hash < b.name_hash; }
};

// A row for the module precedes one for any module; a suspect is one in every module.
void apply_rows(Kernel* kernel) {
    uint32_t flags = 0;
    uint64_t written = 0;
    const auto [first, last] =
        std::equal_range(rows.begin(), rows.end(), name_hash(kernel->name), ByName{});
    for (auto row = first; row != last; ++row) {
        if (row->module && row->module != kernel->module) continue;
        flags |= row->flags & board::kSuspect;
        const bool known_better = (flags & board::kWritesOnly) && !row->module;
        if (!(row->flags & board::kWritesOnly) || known_better) continue;
        flags |= board::kWritesOnly;
        written = row->written;
    }
    kernel->flags.store(flags, std::memory_order_relaxed);
    kernel->written.store(written, std::memory_order_relaxed);
}

void forget_counts() {
    first_launches = 0;
    for (const auto& [identity, kernel] : known) {
        kernel->launches.store(0, std::memory_order_relaxed);
        for (std::atomic<uint64_t>& verdict : kernel->verdicts)
            verdict.store(0, std::memory_order_relaxed);
        kernel->guessed.store(false, std::memory_order_relaxed);
        kernel->order.store(0, std::memory_order_relaxed);
    }
}

template <class Ask>
bool read_layout(Ask ask, Layout* layout) {
    for (size_t index = 0;; ++index) {
        size_t offset = 0;
        size_t size = 0;
        const CUresult result = ask(index, &offset, &size);
        if (result == CUDA_ERROR_INVALID_VALUE) return true;  // past the last one
        if (result != CUDA_SUCCESS) return false;
        layout->emplace_back(offset, size);
    }
}

// Asks the driver what the handle is: a function, or a library's kernel used as one.
Identity identify(CUfunction function) {
    auto* const kernel = reinterpret_cast<CUkernel>(function);
    const char* name = nullptr;
    Layout layout;
    bool laid_out = false;
    uint64_t module = 0;
    if (driver.cuFuncGetName && driver.cuFuncGetName(&name, function) == CUDA_SUCCESS) {
        laid_out = driver.cuFuncGetParamInfo &&
                   read_layout(
                       [&](size_t index, size_t* offset, size_t* size) {
                           return driver.cuFuncGetParamInfo(function, index, offset, size);
                       },
                       &layout);
        module = modules::hash_of(function);
    } else if (driver.cuKernelGetName && driver.cuKernelGetName(&name, kernel) == CUDA_SUCCESS) {
        laid_out = driver.cuKernelGetParamInfo &&
                   read_layout(
                       [&](size_t index, size_t* offset, size_t* size) {
                           return driver.cuKernelGetParamInfo(kernel, index, offset, size);
                       },
                       &layout);
        module = modules::hash_of(kernel);
    }
    return {name ? name : "", module, laid_out, laid_out ? layout : Layout{}};
}

void look_up_summary(Kernel* kernel) {
    kernel->summary.store(summaries::find(kernel->module, kernel->name, kernel->parameters),
                          std::memory_order_release);
}

Kernel* intern(const Identity& identity) {
    std::unique_ptr<Kernel>& kernel = known[identity];
    if (kernel) return kernel.get();
    kernel = std::make_unique<Kernel>();
    kernel->name = std::get<0>(identity);
    kernel->module = std::get<1>(identity);
    kernel->laid_out = std::get<2>(identity);
    for (const auto& [offset, size] : std::get<3>(identity))
        kernel->parameters.push_back({offset, size});
    look_up_summary(kernel.get());
    apply_rows(kernel.get());
    return kernel.get();
}

Kernel* look_up(CUfunction function) {
    const uint64_t generation = handles.load(std::memory_order_acquire);
    const Identity identity = [&] {  // no lock across calls to the driver
        const RelaxedCapture relaxed;
        return identify(function);
    }();
    const std::lock_guard lock(mutex);
    Kernel* kernel = intern(identity);
    std::atomic<Entry*>& bucket = bucket_of(function);
    Entry* entry = bucket.load(std::memory_order_relaxed);
    while (entry && entry->function != function) entry = entry->next;
    if (entry) {
        entry->kernel.store(kernel, std::memory_order_relaxed);
        entry->generation.store(generation, std::memory_order_release);
    } else {
        bucket.store(
            new Entry{function, {generation}, {kernel}, bucket.load(std::memory_order_relaxed)},
            std::memory_order_release);
    }
    return kernel;
}

}  // namespace

Kernel* find(CUfunction function) {
    const uint64_t generation = handles.load(std::memory_order_acquire);
    for (Entry* entry = bucket_of(function).load(std::memory_order_acquire); entry;
         entry = entry->next)
        if (entry->function == function &&
            entry->generation.load(std::memory_order_acquire) == generation)
            return entry->kernel.load(std::memory_order_relaxed);
    return look_up(function);
}

void count_launch(Kernel* kernel, Verdict verdict, uint64_t times) {
    kernel->verdicts[verdict].fetch_add(times, std::memory_order_relaxed);
    kernel->launches.fetch_add(times, std::memory_order_relaxed);
    if (kernel->order.load(std::memory_order_relaxed)) return;
    uint64_t none = 0;
    kernel->order.compare_exchange_strong(none, ++first_launches, std::memory_order_relaxed);
}

std::atomic<bool> counting{false};

void count_afresh() {
    const std::lock_guard lock(mutex);
    forget_counts();
}

void arm(const board::KernelRow* first, size_t count) {
    const std::lock_guard lock(mutex);
    rows.assign(first, first + count);
    std::sort(rows.begin(), rows.end(), ByName{});
    for (const auto& [identity, kernel] : known) apply_rows(kernel.get());
    forget_counts();
    generations.fetch_add(1, std::memory_order_release);
}

uint64_t generation() {
    return generations.load(std::memory_order_acquire);
}

void summarise(uint64_t module) {
    const std::lock_guard lock(mutex);
    for (const auto& [identity, kernel] : known)
        if (kernel->module == module) look_up_summary(kernel.get());
    generations.fetch_add(1, std::memory_order_release);
}

std::vector<const Kernel*> launched() {
    const std::lock_guard lock(mutex);
    std::vector<const Kernel*> found;
    for (const auto& [identity, kernel] : known)
        if (kernel->order.load(std::memory_order_relaxed)) found.push_back(kernel.get());
    std::sort(found.begin(), found.end(), [](const Kernel* a, const Kernel* b) {
        return a->order.load(std::memory_order_relaxed) < b->order.load(std::memory_order_relaxed);
    });
    return found;
}

void forget_functions() {
    handles.fetch_add(1, std::memory_order_release);
}

}  // namespace phos::kernels
