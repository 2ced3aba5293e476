#include "memory.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "driver.h"

namespace twice::memory {
namespace {

std::mutex mutex;
std::map<uint64_t, uint64_t> known;  // the ends by the begins

}  // namespace

void add(CUdeviceptr address, size_t bytes) {
    if (!address || !bytes) return;
    const std::lock_guard lock(mutex);
    uint64_t& end = known[address];
    end = std::max<uint64_t>(end, address + bytes);
}

void remove(CUdeviceptr address) {
    const std::lock_guard lock(mutex);
    known.erase(address);
}

void remove(CUdeviceptr address, size_t bytes) {
    const std::lock_guard lock(mutex);
    const uint64_t end = address + bytes;
    auto at = known.lower_bound(address);
    if (at != known.begin() && std::prev(at)->second > address) --at;
    while (at != known.end() && at->first < end) {
        const auto [begin, rest] = *at;
        at = known.erase(at);
        if (begin < address) known[begin] = address;
        if (rest > end) known[end] = rest;
    }
}

std::vector<Range> all() {
    const std::lock_guard lock(mutex);
    return {known.begin(), known.end()};
}

Pointed pointed_into(const std::vector<unsigned char>& parameters) {
    const std::lock_guard lock(mutex);
    Pointed found;
    for (size_t at = 0; at + 8 <= parameters.size(); at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, &parameters[at], sizeof word);
        const auto after = known.upper_bound(word);
        if (after != known.begin() && word < std::prev(after)->second) {
            const Range range = *std::prev(after);
            if (std::find(found.ranges.begin(), found.ranges.end(), range) == found.ranges.end())
                found.ranges.push_back(range);
            continue;
        }
        CUdeviceptr base = 0;
        size_t size = 0;
        found.strays += driver.cuMemGetAddressRange_v2(&base, &size, word) == CUDA_SUCCESS;
    }
    return found;
}

}  // namespace twice::memory
