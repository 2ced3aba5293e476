#include "memory/event_words.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>

#include "base/descriptors.h"
#include "base/process.h"

namespace phos::event_words {
namespace {

constexpr unsigned kGenerationBits = 24;
constexpr unsigned kCounterBits = 8;  // 0: never recorded
constexpr uint32_t kGenerations = 1u << kGenerationBits;

// The words of this process that no event has, those that were given back first at the front: their
// last records are most likely to be reached. Guarded by blocks::mutex.
std::deque<uint64_t> unused;

uint64_t pack(const Record& record) {
    const uint64_t counter = record.any() ? record.counter + 1 : 0;
    return static_cast<uint64_t>(record.generation) << (32 + kCounterBits) | counter << 32 |
           record.value;
}

Record unpack(uint64_t word) {
    Record record;
    record.generation = static_cast<uint32_t>(word >> (32 + kCounterBits));
    // A counter that does not exist, which only a broken peer can have written, is none.
    const auto counter = static_cast<uint32_t>(word >> 32) & ((1u << kCounterBits) - 1);
    if (counter && counter <= kCounters) record.counter = counter - 1;
    record.value = static_cast<uint32_t>(word);
    return record;
}

CUmemLocation host_near(int device) {
    int node = 0;
    // Without NUMA there is no id, and 0 is what the driver wants.
    if (driver.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) !=
            CUDA_SUCCESS ||
        node < 0)
        node = 0;
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    location.id = node;
    return location;
}

// Where a block of words lies, which is from where the host reaches it.
CUmemLocation location_of(const blocks::Block& block) {
    const CUmemLocation& known = block.properties.location;
    return known.type == CU_MEM_LOCATION_TYPE_HOST || known.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
               ? known
               : host_near(block.home);
}

bool can_share_host_memory(int device) {
    for (const CUdevice_attribute attribute :
         {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
        int value = 0;
        if (driver.cuDeviceGetAttribute(&value, attribute, device) != CUDA_SUCCESS || !value)
            return false;
    }
    return driver.cuStreamWriteValue32_v2 && driver.cuStreamWaitValue32_v2;
}

// Makes a block of words. Its descriptor is kept from the beginning, as peers may ask for it.
CUresult make_block(int device) {
    if (!can_share_host_memory(device)) return CUDA_ERROR_NOT_SUPPORTED;
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = host_near(device);
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t size = 0;
    CUresult result =
        driver.cuMemGetAllocationGranularity(&size, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result != CUDA_SUCCESS) return result;
    blocks::Block* block = nullptr;
    result = blocks::create(properties, size, wire::kExported, &block);
    if (result != CUDA_SUCCESS) return result;
    int descriptor = -1;
    CUdeviceptr at = 0;
    result = blocks::export_descriptor(*block, &descriptor);
    if (result == CUDA_SUCCESS) {
        block->descriptor = descriptors::keep(descriptor);
        result = driver.cuMemAddressReserve(&at, size, 0, 0, 0);
    }
    if (result != CUDA_SUCCESS) {
        blocks::drop_if_unused(block);
        return result;
    }
    result = map(block, at, size, device);
    if (result != CUDA_SUCCESS) {
        driver.cuMemAddressFree(at, size);
        return result;
    }
    std::memset(reinterpret_cast<void*>(at), 0, size);
    for (uint64_t words = at; words < at + size; words += kStride) unused.push_back(words);
    return CUDA_SUCCESS;
}

}  // namespace

Promise Counter::promise() const {
    const uint64_t word = promised.load();
    return {static_cast<uint32_t>(word), static_cast<int32_t>(word >> 32)};
}

bool Counter::replace(const Promise& before, const Promise& after) {
    const auto word = [](const Promise& promise) {
        return static_cast<uint64_t>(static_cast<uint32_t>(promise.by)) << 32 | promise.value;
    };
    uint64_t expected = word(before);
    return promised.compare_exchange_strong(expected, word(after));
}

Record Words::record() const {
    return unpack(latest.load(std::memory_order_acquire));
}

void Words::publish(const Record& record) {
    uint64_t before = latest.load(std::memory_order_relaxed);
    while (unpack(before).generation == record.generation &&
           !latest.compare_exchange_weak(before, pack(record), std::memory_order_acq_rel)) {
    }
}

bool Words::has_reached(const Record& record) const {
    const uint32_t reached = counters[record.counter].reached.load(std::memory_order_acquire);
    return static_cast<int32_t>(reached - record.value) >= 0;  // as the device compares
}

void Words::keep_promises_of_the_dead() {
    for (Counter& counter : counters) {
        uint32_t reached = counter.reached.load();
        const Promise promise = counter.promise();
        if (reached == promise.value || promise.by == getpid() || began(promise.by)) continue;
        counter.reached.compare_exchange_strong(reached, promise.value);
    }
}

uint64_t Place::address_of(const Record& record) const {
    return address + offsetof(Words, counters) + record.counter * sizeof(Counter) +
           offsetof(Counter, reached);
}

CUresult take(int device, Place* place) {
    const std::lock_guard lock(blocks::mutex);
    for (bool fresh = false;; fresh = true) {
        for (auto at = unused.begin(); at != unused.end(); ++at) {
            Words& words = *reinterpret_cast<Words*>(*at);
            words.keep_promises_of_the_dead();
            if (!std::all_of(std::begin(words.counters), std::end(words.counters),
                             [](const Counter& counter) { return counter.is_at_rest(); }))
                continue;
            *place = {*at, words.record().generation};
            unused.erase(at);
            return CUDA_SUCCESS;
        }
        if (fresh) return CUDA_ERROR_OUT_OF_MEMORY;  // a block has words, so this is never reached
        const CUresult result = make_block(device);
        if (result != CUDA_SUCCESS) return result;
    }
}

void give_back(const Place& place) {
    const std::lock_guard lock(blocks::mutex);
    // A process that still has the event open sees that it is another one's now.
    Record none;
    none.generation = (place.generation + 1) % kGenerations;
    place.words().latest.store(pack(none), std::memory_order_release);
    unused.push_back(place.address);
}

CUresult allow(uint64_t address, int device) {
    const std::lock_guard lock(blocks::mutex);
    const auto* mapping = blocks::find(address);
    if (!mapping) return CUDA_ERROR_INVALID_VALUE;
    for (const CUmemAccessDesc& access : mapping->second.access)
        if (access.location.type == CU_MEM_LOCATION_TYPE_DEVICE && access.location.id == device)
            return CUDA_SUCCESS;
    const RelaxedCapture relaxed;
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device},
                                 CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return blocks::set_access(mapping->first, mapping->second.size, &access, 1);
}

CUresult map(blocks::Block* block, uint64_t address, uint64_t size, int device) {
    // Otherwise the host would fault.
    if (block->foreign || block->properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        blocks::drop_if_unused(block);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    block->home = device;
    CUresult result = blocks::map(block, address, size, 0);
    if (result != CUDA_SUCCESS) {
        blocks::drop_if_unused(block);
        return result;
    }
    const CUmemAccessDesc access[] = {
        {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
        {location_of(*block), CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    result = blocks::set_access(address, size, access, std::size(access));
    if (result != CUDA_SUCCESS) blocks::unmap(address, size);
    return result;
}

void relocate(blocks::Block& block) {
    if (block.home < 0) return;
    driver.cuMemGetAllocationPropertiesFromHandle(&block.properties, block.handle);
    for (const uint64_t address : block.mappings)
        for (CUmemAccessDesc& access : blocks::by_address.at(address).access)
            if (access.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                access.location = location_of(block);
}

bool readable(uint64_t address) {
    return blocks::mapped && blocks::find(address);
}

}  // namespace phos::event_words
