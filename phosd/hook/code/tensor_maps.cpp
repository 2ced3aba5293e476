#include "code/tensor_maps.h"

#include <cstring>
#include <mutex>

#include "base/overrides.h"

namespace phos {

std::atomic<bool> tensor_maps::made{false};

namespace {

// The slots of a set of kWays are used in turn.
constexpr size_t kSets = 2048;
constexpr size_t kWays = 4;
struct Slot {
    std::atomic<uint64_t> key;
    std::atomic<uint64_t> address;
};
struct Set {
    Slot ways[kWays];
    size_t next;  // guarded by the mutex
};
Set sets[kSets];
std::mutex mutex;

uint64_t key_of(const void* bytes) {
    uint64_t words[sizeof(CUtensorMap) / sizeof(uint64_t)];
    std::memcpy(words, bytes, sizeof words);
    uint64_t key = 0;
    for (const uint64_t word : words) {
        key = (key ^ word) * 0x9E37'79B9'7F4A'7C15u;
        key ^= key >> 29;
    }
    return key | 1;  // 0 is an empty slot
}

CUresult note(CUresult result, const CUtensorMap* map, const void* address) {
    if (result != CUDA_SUCCESS || !map) return result;
    const uint64_t key = key_of(map);
    const std::lock_guard lock(mutex);
    Set& set = sets[key >> 8 & (kSets - 1)];
    Slot* slot = nullptr;
    for (Slot& way : set.ways)
        if (way.key.load(std::memory_order_relaxed) == key) slot = &way;
    if (!slot) slot = &set.ways[set.next++ % kWays];
    // A reader during the change sees one of the keys, or none, with each address.
    slot->key.store(0, std::memory_order_seq_cst);
    slot->address.store(reinterpret_cast<uint64_t>(address), std::memory_order_seq_cst);
    slot->key.store(key, std::memory_order_seq_cst);
    tensor_maps::made.store(true, std::memory_order_relaxed);
    return result;
}

}  // namespace

uint64_t tensor_maps::address_in(const void* bytes) {
    const uint64_t key = key_of(bytes);
    for (const Slot& slot : sets[key >> 8 & (kSets - 1)].ways) {
        if (slot.key.load(std::memory_order_seq_cst) != key) continue;
        const uint64_t address = slot.address.load(std::memory_order_seq_cst);
        if (slot.key.load(std::memory_order_seq_cst) == key) return address;
    }
    return 0;
}

CUresult overrides::cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dimensions, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return note(
        driver.cuTensorMapEncodeTiled(map, type, rank, address, dimensions, strides, box,
                                      element_strides, interleave, swizzle, promotion, fill),
        map, address);
}

CUresult overrides::cuTensorMapEncodeIm2col(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dimensions, const cuuint64_t* strides, const int* lower, const int* upper,
    cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) {
    return note(driver.cuTensorMapEncodeIm2col(map, type, rank, address, dimensions, strides, lower,
                                               upper, channels, pixels, element_strides, interleave,
                                               swizzle, promotion, fill),
                map, address);
}

CUresult overrides::cuTensorMapEncodeIm2colWide(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dimensions, const cuuint64_t* strides, int lower, int upper,
    cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* element_strides,
    CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return note(driver.cuTensorMapEncodeIm2colWide(map, type, rank, address, dimensions, strides,
                                                   lower, upper, channels, pixels, element_strides,
                                                   interleave, mode, swizzle, promotion, fill),
                map, address);
}

CUresult overrides::cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
    return note(driver.cuTensorMapReplaceAddress(map, address), map, address);
}

}  // namespace phos
