// Physical memory: a memfd for each allocation, so that it can be exported, imported and mapped
// as a GPU's can, and lives while anybody holds it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/descriptor.h"

namespace phos::softgpu {

constexpr size_t kGranularity = 2ull << 20;

class Memory {
  public:
    // New memory. `device` is an ordinal, -1 for host memory (never accounted). With
    // `exportable` a descriptor stays open; without, the first mapping keeps the memory alive.
    // Throws CUDA_ERROR_OUT_OF_MEMORY.
    static std::shared_ptr<Memory> create(size_t size, int device, bool exportable,
                                          const CUmemAllocationProp& properties);
    // What another process exported. The descriptor stays the caller's.
    static std::shared_ptr<Memory> import(int descriptor);
    ~Memory();

    // Maps [offset, offset + size) at `address`, replacing what is there. `protection` as mmap's.
    void map_at(uint64_t address, size_t size, size_t offset, int protection);
    int descriptor() const { return file_.get(); }

    // For a checkpoint: take a private copy, give up file and accounting; and the way back.
    // `mapped_at` is where the memory can be read when it keeps no descriptor.
    void save(uint64_t mapped_at);
    void load();
    // After everything has been mapped again: drop the descriptor that only the mapping needed.
    void settle();

    const uint64_t id;  // never used again in this process
    const size_t size;  // bytes, a multiple of kGranularity
    const int device;
    const bool imported;
    const CUmemAllocationProp properties;

  private:
    Memory(size_t size, int device, bool imported, bool exportable,
           const CUmemAllocationProp& properties);
    void make_file();
    void claim();
    void give_up();

    const bool exportable_;
    Descriptor file_;
    uint64_t inode_ = 0;
    bool claimed_ = false;
    std::byte* saved_ = nullptr;
};

}  // namespace phos::softgpu
