// Runs one block of a grid: its warps in turn, each in lockstep.
#pragma once

#include <memory>

#include "warp.h"

namespace phos::ptx {

class BlockRunner {
  public:
    BlockRunner(const Launch& launch, const Program& program, uint32_t grid);
    void start(uint64_t number);  // the block's place in the grid
    // Runs for a while. True when the block has finished; throws Fault.
    bool run(softgpu::MemoryUsers::Use& use);
    // Thread instructions since the last call.
    uint64_t take_instructions();

  private:
    void set_fixed_specials(uint32_t grid);
    void set_block_specials();
    void run_warp(Warp& warp);
    Split* choose(Warp& warp);
    void run_split(Warp& warp, Split& split);
    void run_operations(const Block& block, Warp& warp, uint32_t mask);
    // What ends a basic block; false when the split must not go on at once.
    bool finish(const Block& block, Warp& warp, Split& split);
    bool gathered(const Block& block, const Warp& warp, const Split& split) const;
    void arrive(const Block& block, Warp& warp, Split& split);
    void settle_barrier(uint32_t number);
    void release(uint32_t number);
    void exit(Warp& warp, Split& split);
    void call(const Block& block, Warp& warp, Split& split, uint32_t function);
    void call_indirect(const Block& block, Warp& warp, Split& split);
    void call_builtin(const CallSite& site, Builtin builtin, Warp& warp, uint32_t mask);
    void return_from(Warp& warp, Split& split);
    void branch_indexed(const Block& block, Warp& warp, Split& split);
    void scatter(Warp& warp, Split& split, const std::array<uint32_t, kLanes>& targets);
    void add_split(Warp& warp, uint32_t block, uint32_t mask);
    void merge(Warp& warp);
    bool break_deadlock();
    std::byte* local(const Warp& warp, unsigned lane, uint32_t offset) const;

    const Launch& launch_;
    const Program& program_;
    BlockState state_;
    Dim3 index_;
    unsigned threads_;
    unsigned alive_ = 0;
    int64_t budget_ = 0;
    uint64_t clock_ = 0;
    uint64_t instructions_ = 0;
    std::vector<Warp> warps_;
    std::array<Barrier, 16> barriers_;
    struct Free {
        void operator()(std::byte* memory) const;
    };
    using Memory = std::unique_ptr<std::byte, Free>;
    static Memory allocate(size_t bytes);
    Memory registers_, local_, shared_;
};

// builtin.cpp: the functions that CUDA's own library provides.
struct Caller {
    const Launch& launch;
    Dim3 block, thread;
    const std::byte* local;  // of the lane
    size_t local_bytes;
};
uint32_t device_printf(const Caller& caller, uint64_t format, uint64_t arguments);
[[noreturn]] void assertion_failed(const Caller& caller, uint64_t message, uint64_t file,
                                   uint32_t line, uint64_t function);

}  // namespace phos::ptx
