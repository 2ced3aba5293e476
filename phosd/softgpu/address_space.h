// Which addresses the device may touch. The interpreter asks before every global access, so the
// answer for device memory is one table look-up; host memory (pinned, managed) is rare and slower.
#pragma once

#include <atomic>
#include <cstdint>

#include "memory_users.h"

namespace phos::softgpu {

// Device pointers are host pointers in this window of the process: memory is mapped at its address.
class AddressSpace {
  public:
#ifdef PHOS_THREAD_SANITIZER  // it allows few addresses: there is room below the libraries
    static constexpr uint64_t kSize = 1ull << 38;
    static constexpr uint64_t kBase = 0x7e80'0000'0000;
#else
    static constexpr uint64_t kSize = 1ull << 40;
    static constexpr uint64_t kBase = 0x7000'0000'0000 - kSize;
#endif
    static constexpr unsigned kPageShift = 21;  // the granularity of VMM allocations, 2 MiB
    static constexpr unsigned kMaxDevices = 4;

    // One byte a page: bit d says that device d may read, bit d + 4 that it may write.
    std::atomic<uint8_t>* pages = nullptr;

    // A thread that asks and then touches does both within one use of memory.
    MemoryUsers users;

    bool allows(uint64_t address, uint64_t bytes, unsigned device, bool write) const {
        const uint64_t offset = address - kBase;
        if (__builtin_expect(offset < kSize && bytes <= kSize - offset, 1)) {
            const uint8_t wanted = static_cast<uint8_t>(1u << (device + (write ? kMaxDevices : 0)));
            const uint64_t last = (offset + bytes - 1) >> kPageShift;
            for (uint64_t page = offset >> kPageShift; page <= last; ++page)
                if (!(pages[page].load(std::memory_order_relaxed) & wanted)) return false;
            return true;
        }
        return allows_host(address, bytes, write);
    }

    virtual ~AddressSpace() = default;

  protected:
    virtual bool allows_host(uint64_t address, uint64_t bytes, bool write) const = 0;
};

}  // namespace phos::softgpu
