// The address space of the devices: reservations, mappings, access, and the host memory that
// devices may reach. One for the process; every device pointer means the same on each device.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "address_space.h"
#include "core/memory.h"

namespace phos::softgpu {

struct Mapping {
    uint64_t address;
    size_t size;
    size_t offset;
    std::shared_ptr<Memory> memory;
    uint8_t access = 0;  // as AddressSpace::pages
    bool host = false;   // the program's own code may touch it
    uint64_t id = 0;     // CU_POINTER_ATTRIBUTE_BUFFER_ID: each mapping has its own
};

class Space final : public AddressSpace {
  public:
    Space();

    // Addresses, a multiple of kGranularity. `hint` is taken when it is free, 0 means anywhere.
    uint64_t reserve(size_t size, size_t alignment, uint64_t hint);
    void free_reservation(uint64_t address, size_t size);

    void map(uint64_t address, size_t size, size_t offset, std::shared_ptr<Memory> memory);
    void unmap(uint64_t address, size_t size);
    // `access` for one device; the range is made of whole mappings.
    void set_access(uint64_t address, size_t size, unsigned device, bool read, bool write);

    // For memory in the host: whether the program's own code may touch it.
    void set_host_access(uint64_t address, size_t size, bool allowed);

    // The mapping that holds `address`; null memory when there is none.
    Mapping find(uint64_t address) const;
    // Whether `address` is mapped for the program's own code alone: no device may touch it.
    bool host_only(uint64_t address) const;
    // Whether `address` lies in a reservation: then it is a device address, mapped or not.
    bool reserved(uint64_t address) const;
    // Whether any device may touch the range (a copy between devices needs no peer access).
    bool reachable(uint64_t address, uint64_t bytes, bool write) const;

    // Host memory that devices may reach: pinned, registered, managed. Whole pages.
    void add_host(uint64_t address, size_t size, bool writable);
    void remove_host(uint64_t address, size_t size);

    static bool inside(uint64_t address) { return address - kBase < kSize; }

    // For a checkpoint, with no call and no work in the process.
    std::vector<Mapping> mappings() const;
    void hide();    // nothing is mapped any more; the addresses stay reserved
    void reveal();  // every mapping is back

    // Reads what the driver's polling calls read without a lock: gone while all is hidden.
    void poll() const { static_cast<void>(*polled_); }

  protected:
    bool allows_host(uint64_t address, uint64_t bytes, bool write) const override;

  private:
    using Mappings = std::map<uint64_t, Mapping>;
    uint64_t find_free(size_t size, size_t alignment, uint64_t hint) const;
    // The mappings that make up exactly this range; throws CUDA_ERROR_INVALID_VALUE otherwise.
    std::pair<Mappings::iterator, Mappings::iterator> whole(uint64_t address, size_t size);
    void set_pages(const Mapping& mapping, uint8_t access);
    void protect_polled(int protection);
    const std::pair<const uint64_t, size_t>* reservation(uint64_t address) const;

    const volatile uint32_t* polled_;  // a page of its own
    mutable std::mutex mutex_;
    std::map<uint64_t, size_t> reservations_;
    Mappings mappings_;
    uint64_t last_id_ = 0;  // of a mapping

    // Host pages: three levels, never freed, so that the interpreter reads without a lock.
    static constexpr unsigned kLeafBits = 11, kMiddleBits = 12, kTopBits = 12, kHostShift = 12;
    using Leaf = std::atomic<uint8_t>[1u << kLeafBits];
    using Middle = std::atomic<Leaf*>[1u << kMiddleBits];
    std::atomic<uint8_t>* host_page(uint64_t address, bool make) const;
    void set_host(uint64_t address, size_t size, uint8_t access);
    mutable std::atomic<Middle*> host_[1u << kTopBits] = {};
};

}  // namespace phos::softgpu
