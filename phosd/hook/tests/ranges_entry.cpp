// What phosd's tests call, through ctypes: a table and a launch in, ranges out.
#include <cstring>

#include "ranges/launch_ranges.h"

namespace phos {

Driver driver;

namespace {

struct Found {
    uint64_t begin;
    uint64_t end;
    uint32_t use;
    uint32_t is_origin;  // an address: the memory block that it is in
};

// What is allocated in this launch.
const ranges::Extent* extents = nullptr;
size_t extent_count = 0;

bool extent_of(uint64_t address, ranges::Extent* extent) {
    for (const auto* one = extents; one != extents + extent_count; ++one)
        if (one->begin <= address && address < one->end) {
            *extent = *one;
            return true;
        }
    return false;
}

}  // namespace
}  // namespace phos

using namespace phos;

// Returns why a table is refused; an empty text if it is taken.
extern "C" __attribute__((visibility("default"))) const char* take_table(int descriptor) {
    static std::string text;
    uint64_t module = 0;
    text = summaries::add(descriptor, &module).text;
    return text.c_str();
}

// Sets what is allocated while launches are asked for: `count` extents, which stay the caller's.
extern "C" __attribute__((visibility("default"))) void allocate(const ranges::Extent* some,
                                                                size_t count) {
    extents = some;
    extent_count = count;
}

// Sets what a launch with these parameters accesses, at most `most`; each through remembered
// results, when they are refined, with `remembered`. Returns how many there are; -1: the kernel is
// not known. `unknown` gets the uses of which not all is told, `verdict` a kernels::Verdict.
extern "C" __attribute__((visibility("default"))) int ranges_of(uint64_t module, const char* name,
                                                                const unsigned char* parameters,
                                                                size_t size, const uint32_t* sizes,
                                                                int remembered, Found* found,
                                                                int most, uint32_t* unknown,
                                                                uint32_t* verdict) {
    const std::vector<summaries::Parameter> layout{{0, static_cast<uint32_t>(size)}};
    const summaries::Summary* const summary = summaries::find(module, name, layout);
    if (!summary) return -1;
    kernels::Kernel kernel{};
    uint64_t inputs[table::kMaxInputs];
    if (!ranges::read_inputs(kernel, *summary, {nullptr, parameters, size}, inputs)) return -1;
    ranges::Launch launch{{}, inputs};
    std::memcpy(launch.sizes, sizes, sizeof launch.sizes);
    ranges::Accesses accesses;
    if (remembered) ranges::find(*summary, launch, &accesses);
    while (ranges::refine()) {
    }
    (remembered ? ranges::find : ranges::compute)(*summary, launch, &accesses);
    *unknown = accesses.unknown | accesses.anywhere;
    *verdict = ranges::judge(*summary, accesses, inputs, extent_of);
    int count = 0;
    for (uint32_t i = 0; i < accesses.range_count && count < most; ++i) {
        const ranges::Range& one = accesses.ranges[i];
        const uint64_t begin = one.begin + (one.base == ranges::kNoBase ? 0 : inputs[one.base]);
        uint64_t end = 0;
        if (__builtin_add_overflow(begin, one.length, &end))
            *unknown |= one.use;
        else
            found[count++] = {begin, end, one.use, 0};
    }
    for (uint32_t i = 0; i < accesses.origin_count && count < most; ++i) {
        const uint64_t address = inputs[accesses.origins[i].input];
        found[count++] = {address, address, accesses.origins[i].use, 1};
    }
    return count;
}
