// Device memory for the tests and the benchmark: one mapping in the device's window.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "../../address_space.h"

namespace phos::ptx::test {

class Memory final : public softgpu::AddressSpace {
  public:
    explicit Memory(uint64_t bytes) : end_(kBase + bytes) {
        void* wanted = reinterpret_cast<void*>(kBase);
        if (::mmap(wanted, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != wanted) {
            std::perror("mmap of the device's window");
            std::exit(2);
        }
        const uint64_t count = kSize >> kPageShift;
        table_ = std::make_unique<std::atomic<uint8_t>[]>(count);
        pages = table_.get();
        for (uint64_t page = 0; page < bytes >> kPageShift; ++page) pages[page] = 0xff;
    }
    ~Memory() override { ::munmap(reinterpret_cast<void*>(kBase), end_ - kBase); }

    uint64_t allocate(uint64_t bytes, uint64_t alignment = 256) {
        const uint64_t at = (next_ + alignment - 1) / alignment * alignment;
        if (at + bytes > end_) return 0;
        next_ = at + bytes;
        return at;
    }

  protected:
    bool allows_host(uint64_t, uint64_t, bool) const override { return false; }

  private:
    std::unique_ptr<std::atomic<uint8_t>[]> table_;
    uint64_t next_ = kBase, end_;
};

}  // namespace phos::ptx::test
