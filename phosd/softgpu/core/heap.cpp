#include "core/heap.h"

#include <algorithm>
#include <atomic>

#include "core/error.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

size_t round_up(size_t value, size_t step) {
    return (value + step - 1) / step * step;
}

uint64_t next_buffer_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

}  // namespace

Heap::~Heap() {
    std::lock_guard lock(mutex_);
    while (!segments_.empty()) drop_segment(segments_.begin()->first);
}

uint64_t Heap::allocate(size_t size, const Context* owner, size_t alignment) {
    require(size > 0);
    require(size <= AddressSpace::kSize, CUDA_ERROR_OUT_OF_MEMORY);
    alignment = std::max(alignment, kAlignment);
    const size_t taken = round_up(size, kAlignment);
    std::lock_guard lock(mutex_);
    uint64_t address = 0;
    for (auto hole = holes_by_size_.lower_bound({taken, 0}); hole != holes_by_size_.end(); ++hole)
        if ((address = take(hole->second, hole->first, taken, alignment))) break;
    if (!address) {
        const uint64_t segment = add_segment(round_up(taken, kGranularity));
        address = take(segment, segments_.at(segment).size, taken, alignment);
    }
    const uint64_t segment = std::prev(segments_.upper_bound(address))->first;
    segments_.at(segment).used += taken;
    blocks_[address] = {taken, segment, {address, size, next_buffer_id(), owner}};
    used_ += taken;
    used_high = std::max(used_high, used_);
    return address;
}

// Cuts `size` bytes out of a hole; 0 when they do not fit at this alignment.
uint64_t Heap::take(uint64_t start, size_t hole, size_t size, size_t alignment) {
    const uint64_t address = round_up(start, alignment);
    if (address + size > start + hole) return 0;
    remove_hole(start, hole);
    if (address > start) add_hole(start, address - start);
    if (address + size < start + hole) add_hole(address + size, start + hole - address - size);
    return address;
}

bool Heap::free(uint64_t address) {
    std::lock_guard lock(mutex_);
    const auto block = blocks_.find(address);
    if (block == blocks_.end()) return false;
    free_block(block);
    return true;
}

bool Heap::retire(uint64_t address) {
    std::lock_guard lock(mutex_);
    const auto block = blocks_.find(address);
    if (block == blocks_.end() || block->second.retired) return false;
    block->second.retired = true;
    return true;
}

void Heap::free_block(std::map<uint64_t, Block>::iterator block) {
    const auto [address, freed] = *block;
    blocks_.erase(block);
    used_ -= freed.taken;
    Segment& segment = segments_.at(freed.segment);
    segment.used -= freed.taken;

    uint64_t start = address;
    size_t size = freed.taken;
    const uint64_t segment_end = freed.segment + segment.size;
    const auto next = holes_.lower_bound(address);
    if (next != holes_.begin()) {
        const auto [before, bytes] = *std::prev(next);
        if (before >= freed.segment && before + bytes == start) {
            remove_hole(before, bytes);
            start = before;
            size += bytes;
        }
    }
    if (const auto after = holes_.find(start + size);
        after != holes_.end() && after->first < segment_end) {
        const auto [at, bytes] = *after;
        remove_hole(at, bytes);
        size += bytes;
    }
    add_hole(start, size);
    if (segment.used == 0 && reserved_ > keep_) drop_segment(freed.segment);
}

Allocation Heap::find(uint64_t address) const {
    std::lock_guard lock(mutex_);
    const auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return {};
    const Allocation& allocation = std::prev(next)->second.allocation;
    return address - allocation.address < allocation.size ? allocation : Allocation{};
}

void Heap::free_all_of(const Context* owner) {
    std::lock_guard lock(mutex_);
    for (auto block = blocks_.begin(); block != blocks_.end();) {
        const auto next = std::next(block);
        if (block->second.allocation.owner == owner) free_block(block);
        block = next;
    }
}

uint64_t Heap::add_segment(size_t size) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type =
        device_ < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = std::max(device_, 0);
    Space& space = runtime().space();
    auto memory = Memory::create(size, device_, false, properties);
    const uint64_t address = space.reserve(size, kGranularity, 0);
    space.map(address, size, 0, memory);
    memory->settle();
    if (device_ < 0)
        space.set_host_access(address, size, true);
    else
        space.set_access(address, size, static_cast<unsigned>(device_), true, true);
    for (unsigned device = 0; device < AddressSpace::kMaxDevices; ++device)
        if (const bool write = access_ >> (device + AddressSpace::kMaxDevices) & 1;
            access_ >> device & 1)
            space.set_access(address, size, device, true, write);
    segments_[address] = {size};
    reserved_ += size;
    reserved_high = std::max(reserved_high, reserved_);
    add_hole(address, size);
    return address;
}

void Heap::drop_segment(uint64_t address) {
    const size_t size = segments_.at(address).size;
    for (auto hole = holes_.lower_bound(address);
         hole != holes_.end() && hole->first < address + size;) {
        holes_by_size_.erase({hole->second, hole->first});
        hole = holes_.erase(hole);
    }
    segments_.erase(address);
    reserved_ -= size;
    Space& space = runtime().space();
    space.unmap(address, size);
    space.free_reservation(address, size);
}

void Heap::add_hole(uint64_t address, size_t size) {
    holes_[address] = size;
    holes_by_size_.insert({size, address});
}

void Heap::remove_hole(uint64_t address, size_t size) {
    holes_.erase(address);
    holes_by_size_.erase({size, address});
}

void Heap::set_keep(uint64_t keep) {
    std::lock_guard lock(mutex_);
    keep_ = keep;
}

void Heap::trim(uint64_t keep) {
    std::lock_guard lock(mutex_);
    for (auto segment = segments_.begin(); segment != segments_.end() && reserved_ > keep;) {
        const auto next = std::next(segment);
        if (segment->second.used == 0) drop_segment(segment->first);
        segment = next;
    }
}

void Heap::set_access(unsigned device, bool read, bool write) {
    if (static_cast<int>(device) == device_) return;
    std::lock_guard lock(mutex_);
    const auto read_bit = static_cast<uint8_t>(1u << device);
    const auto write_bit = static_cast<uint8_t>(read_bit << AddressSpace::kMaxDevices);
    access_ = static_cast<uint8_t>((access_ & ~(read_bit | write_bit)) | (read ? read_bit : 0) |
                                   (write ? write_bit : 0));
    for (const auto& [address, segment] : segments_)
        runtime().space().set_access(address, segment.size, device, read, write);
}

}  // namespace phos::softgpu
