#include "core/space.h"

#include <sys/mman.h>

#include <algorithm>

#include "core/error.h"

namespace phos::softgpu {
namespace {

constexpr uint8_t kReadBits = 0x0f, kWriteBits = 0xf0;
constexpr uint8_t kHostRead = 1, kHostWrite = 2;
constexpr size_t kPolledBytes = 4096;

int protection(const Mapping& mapping) {
    if (mapping.host || mapping.access & kWriteBits) return PROT_READ | PROT_WRITE;
    return mapping.access & kReadBits ? PROT_READ : PROT_NONE;
}

void protect(const Mapping& mapping) {
    mprotect(reinterpret_cast<void*>(mapping.address), mapping.size, protection(mapping));
}

// Reserved and not mapped: a touch faults.
bool map_nothing(uint64_t address, size_t size, int fixed) {
    void* wanted = reinterpret_cast<void*>(address);
    void* at =
        mmap(wanted, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    if (at == MAP_FAILED) return false;
    if (at != wanted) {  // a kernel that does not know MAP_FIXED_NOREPLACE
        munmap(at, size);
        return false;
    }
    madvise(at, size, MADV_DONTFORK);
    return true;
}

bool aligned(uint64_t value) {
    return value % kGranularity == 0;
}

}  // namespace

Space::Space() {
    constexpr size_t count = kSize >> kPageShift;
    void* table = mmap(nullptr, count, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(table != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    pages = static_cast<std::atomic<uint8_t>*>(table);
    void* page = mmap(nullptr, kPolledBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(page != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    polled_ = static_cast<const volatile uint32_t*>(page);
}

uint64_t Space::find_free(size_t size, size_t alignment, uint64_t hint) const {
    const auto free_at = [&](uint64_t address) {
        const auto next = reservations_.lower_bound(address);
        if (next != reservations_.end() && next->first - address < size) return false;
        if (next == reservations_.begin()) return true;
        const auto before = std::prev(next);
        return before->first + before->second <= address;
    };
    if (hint && hint % alignment == 0 && inside(hint) && size <= kBase + kSize - hint &&
        free_at(hint))
        return hint;
    uint64_t candidate = kBase;
    const auto round = [&](uint64_t address) {
        return (address + alignment - 1) / alignment * alignment;
    };
    candidate = round(candidate);
    for (const auto& [address, bytes] : reservations_) {
        if (candidate + size <= address) break;
        candidate = std::max(candidate, round(address + bytes));
    }
    require(inside(candidate) && size <= kBase + kSize - candidate, CUDA_ERROR_OUT_OF_MEMORY);
    return candidate;
}

uint64_t Space::reserve(size_t size, size_t alignment, uint64_t hint) {
    require(size > 0 && aligned(size));
    require(size <= kSize, CUDA_ERROR_OUT_OF_MEMORY);
    alignment = std::max(alignment, kGranularity);
    require((alignment & (alignment - 1)) == 0);
    std::lock_guard lock(mutex_);
    const uint64_t address = find_free(size, alignment, hint);
    require(map_nothing(address, size, MAP_FIXED_NOREPLACE), CUDA_ERROR_OUT_OF_MEMORY);
    reservations_[address] = size;
    return address;
}

void Space::free_reservation(uint64_t address, size_t size) {
    std::lock_guard lock(mutex_);
    const auto found = reservations_.find(address);
    require(found != reservations_.end() && found->second == size);
    const auto mapping = mappings_.lower_bound(address);
    require(mapping == mappings_.end() || mapping->first >= address + size);
    munmap(reinterpret_cast<void*>(address), size);
    reservations_.erase(found);
}

void Space::map(uint64_t address, size_t size, size_t offset, std::shared_ptr<Memory> memory) {
    require(size > 0 && aligned(address) && aligned(size) && aligned(offset));
    require(offset <= memory->size && size <= memory->size - offset);
    std::lock_guard lock(mutex_);
    const auto* range = reservation(address);
    require(range && size <= range->first + range->second - address);
    const auto next = mappings_.lower_bound(address);
    require(next == mappings_.end() || next->first - address >= size);
    if (next != mappings_.begin()) {
        const Mapping& before = std::prev(next)->second;
        require(before.address + before.size <= address);
    }
    memory->map_at(address, size, offset, PROT_NONE);
    mappings_[address] = {address, size, offset, std::move(memory), 0, false, ++last_id_};
}

std::pair<Space::Mappings::iterator, Space::Mappings::iterator> Space::whole(uint64_t address,
                                                                             size_t size) {
    require(size > 0 && aligned(address) && aligned(size));
    const auto first = mappings_.find(address);
    auto last = first;
    uint64_t at = address;
    while (last != mappings_.end() && last->first == at && at < address + size) {
        at += last->second.size;
        ++last;
    }
    require(at == address + size);
    return {first, last};
}

void Space::unmap(uint64_t address, size_t size) {
    std::vector<std::shared_ptr<Memory>> gone;  // ends after the lock: it touches the registry
    std::lock_guard lock(mutex_);
    const auto [first, last] = whole(address, size);
    for (auto it = first; it != last; ++it) {
        set_pages(it->second, 0);
        gone.push_back(it->second.memory);
    }
    users.wait();
    map_nothing(address, size, MAP_FIXED);
    mappings_.erase(first, last);
}

void Space::set_pages(const Mapping& mapping, uint8_t access) {
    const uint64_t first = (mapping.address - kBase) >> kPageShift;
    for (uint64_t page = 0; page < mapping.size >> kPageShift; ++page)
        pages[first + page].store(access, std::memory_order_release);
}

void Space::set_access(uint64_t address, size_t size, unsigned device, bool read, bool write) {
    std::lock_guard lock(mutex_);
    const auto [first, last] = whole(address, size);
    const auto read_bit = static_cast<uint8_t>(1u << device);
    const auto write_bit = static_cast<uint8_t>(read_bit << kMaxDevices);
    for (auto it = first; it != last; ++it) {
        Mapping& mapping = it->second;
        const uint8_t before = mapping.access;
        mapping.access = static_cast<uint8_t>((before & ~(read_bit | write_bit)) |
                                              (read ? read_bit : 0) | (write ? write_bit : 0));
        if (before & ~mapping.access) {
            set_pages(mapping, before & mapping.access);
            users.wait();
        }
        protect(mapping);
        set_pages(mapping, mapping.access);
    }
}

void Space::set_host_access(uint64_t address, size_t size, bool allowed) {
    std::lock_guard lock(mutex_);
    const auto [first, last] = whole(address, size);
    for (auto it = first; it != last; ++it) {
        it->second.host = allowed;
        protect(it->second);
    }
}

Mapping Space::find(uint64_t address) const {
    std::lock_guard lock(mutex_);
    const auto next = mappings_.upper_bound(address);
    if (next == mappings_.begin()) return {};
    const Mapping& mapping = std::prev(next)->second;
    return address - mapping.address < mapping.size ? mapping : Mapping{};
}

bool Space::host_only(uint64_t address) const {
    const Mapping mapping = find(address);
    return mapping.host && mapping.access == 0;
}

const std::pair<const uint64_t, size_t>* Space::reservation(uint64_t address) const {
    const auto next = reservations_.upper_bound(address);
    if (next == reservations_.begin()) return nullptr;
    const auto before = std::prev(next);
    return address - before->first < before->second ? &*before : nullptr;
}

bool Space::reserved(uint64_t address) const {
    std::lock_guard lock(mutex_);
    return reservation(address) != nullptr;
}

bool Space::reachable(uint64_t address, uint64_t bytes, bool write) const {
    if (!inside(address)) return allows_host(address, bytes, write);
    const uint64_t offset = address - kBase;
    if (bytes > kSize - offset) return false;
    const uint8_t wanted = write ? kWriteBits : kReadBits;
    const uint64_t last = (offset + bytes - 1) >> kPageShift;
    for (uint64_t page = offset >> kPageShift; page <= last; ++page)
        if (!(pages[page].load(std::memory_order_acquire) & wanted)) return false;
    return true;
}

std::vector<Mapping> Space::mappings() const {
    std::lock_guard lock(mutex_);
    std::vector<Mapping> all;
    for (const auto& [address, mapping] : mappings_) all.push_back(mapping);
    return all;
}

void Space::hide() {
    std::lock_guard lock(mutex_);
    protect_polled(PROT_NONE);
    for (const auto& [address, size] : reservations_)
        require(map_nothing(address, size, MAP_FIXED), CUDA_ERROR_OUT_OF_MEMORY);
}

void Space::reveal() {
    std::lock_guard lock(mutex_);
    for (const auto& [address, mapping] : mappings_)
        mapping.memory->map_at(address, mapping.size, mapping.offset, protection(mapping));
    protect_polled(PROT_READ);
}

void Space::protect_polled(int protection) {
    void* page = const_cast<uint32_t*>(polled_);
    require(mprotect(page, kPolledBytes, protection) == 0, CUDA_ERROR_OPERATING_SYSTEM);
}

std::atomic<uint8_t>* Space::host_page(uint64_t address, bool make) const {
    const uint64_t page = address >> kHostShift;
    if (page >> (kLeafBits + kMiddleBits + kTopBits)) return nullptr;
    std::atomic<Middle*>& top = host_[page >> (kLeafBits + kMiddleBits)];
    Middle* middle = top.load(std::memory_order_acquire);
    if (!middle) {
        if (!make) return nullptr;
        middle = reinterpret_cast<Middle*>(new std::atomic<Leaf*>[1u << kMiddleBits]());
        top.store(middle, std::memory_order_release);
    }
    std::atomic<Leaf*>& slot = (*middle)[(page >> kLeafBits) & ((1u << kMiddleBits) - 1)];
    Leaf* leaf = slot.load(std::memory_order_acquire);
    if (!leaf) {
        if (!make) return nullptr;
        leaf = reinterpret_cast<Leaf*>(new std::atomic<uint8_t>[1u << kLeafBits]());
        slot.store(leaf, std::memory_order_release);
    }
    return &(*leaf)[page & ((1u << kLeafBits) - 1)];
}

void Space::set_host(uint64_t address, size_t size, uint8_t access) {
    std::lock_guard lock(mutex_);
    const uint64_t step = 1ull << kHostShift;
    for (uint64_t at = address & ~(step - 1); at < address + size; at += step) {
        std::atomic<uint8_t>* page = host_page(at, true);
        require(page != nullptr);
        page->store(access, std::memory_order_release);
    }
}

void Space::add_host(uint64_t address, size_t size, bool writable) {
    set_host(address, size, static_cast<uint8_t>(kHostRead | (writable ? kHostWrite : 0)));
}

void Space::remove_host(uint64_t address, size_t size) {
    set_host(address, size, 0);
    users.wait();
}

bool Space::allows_host(uint64_t address, uint64_t bytes, bool write) const {
    const uint64_t step = 1ull << kHostShift;
    if (bytes == 0 || address + bytes < address) return false;
    for (uint64_t at = address & ~(step - 1); at < address + bytes; at += step) {
        const std::atomic<uint8_t>* page = host_page(at, false);
        if (!page) return false;
        if (!(page->load(std::memory_order_acquire) & (write ? kHostWrite : kHostRead)))
            return false;
    }
    return true;
}

}  // namespace phos::softgpu
