// Allocate addresses in slabs by best fit. No memory is touched.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace phos {

class Arena {
  public:
    static constexpr uint64_t kAlignment = 512;  // the driver's own

    void add_slab(uint64_t base, uint64_t size) {
        slabs_[base] = size;
        insert(base, size);
        empty_.insert(base);
    }

    // Returns an address for `size` bytes (a multiple of kAlignment), or 0 if no slab has room.
    uint64_t take(uint64_t size) {
        const auto fit = by_size_.lower_bound({size, 0});
        if (fit == by_size_.end()) return 0;
        const auto [free_size, address] = *fit;
        erase(address, free_size);
        empty_.erase(address);
        if (free_size > size) insert(address + size, free_size - size);
        return address;
    }

    void give(uint64_t address, uint64_t size) {
        const auto slab = std::prev(slabs_.upper_bound(address));
        const auto after = by_address_.find(address + size);
        if (after != by_address_.end() && after->first < slab->first + slab->second) {
            const uint64_t more = after->second;
            erase(address + size, more);
            size += more;
        }
        auto before = by_address_.lower_bound(address);
        if (before != by_address_.begin()) {
            --before;
            const auto [start, length] = *before;
            if (start + length == address && start >= slab->first) {
                erase(start, length);
                address = start;
                size += length;
            }
        }
        insert(address, size);
        if (address == slab->first && size == slab->second) empty_.insert(address);
    }

    // Removes a slab that is wholly free, if more than `keep` are. Returns its address, else 0.
    uint64_t remove_empty(size_t keep) {
        if (empty_.size() <= keep) return 0;
        const uint64_t base = *empty_.begin();
        empty_.erase(base);
        erase(base, slabs_.at(base));
        slabs_.erase(base);
        return base;
    }

    uint64_t slab_of(uint64_t address) const {
        return std::prev(slabs_.upper_bound(address))->first;
    }
    uint64_t slab_size(uint64_t base) const { return slabs_.at(base); }
    bool has_slab(uint64_t base) const { return slabs_.count(base) != 0; }

  private:
    void insert(uint64_t address, uint64_t size) {
        by_address_[address] = size;
        by_size_.insert({size, address});
    }
    void erase(uint64_t address, uint64_t size) {
        by_address_.erase(address);
        by_size_.erase({size, address});
    }

    std::map<uint64_t, uint64_t> slabs_;
    std::map<uint64_t, uint64_t> by_address_;          // free ranges
    std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (size, address) of the same
    std::set<uint64_t> empty_;                         // slabs that are wholly free
};

}  // namespace phos
