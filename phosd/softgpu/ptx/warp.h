// The state of a warp and of its block while they run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "program.h"

namespace phos::ptx {

// Thrown by an operation that fails; run() turns it into a Failure.
struct Fault {
    CUresult code;
    std::string text;
};

[[noreturn]] void fault(CUresult code, std::string text);
[[noreturn]] void bad_address(CUresult code, uint64_t address, uint64_t bytes, Space space,
                              bool write);

struct BlockState;

// Lanes of a warp that stand at the same place. A warp that has not diverged is one split.
struct Split {
    enum class State : uint8_t { ready, converging, at_barrier };
    uint32_t block = 0;  // the basic block it stands before
    uint32_t mask = 0;
    State state = State::ready;
    bool forced = false;         // goes on although lanes that it waited for cannot come
    uint32_t barrier = 0;        // number of the barrier it waits at
    uint32_t barrier_block = 0;  // and the basic block that ended there
    uint64_t stamp = 0;          // when it last ran
};

// What a lane needs when its call returns.
struct Frame {
    uint32_t site, function, frame;
    std::vector<uint64_t> saved;
};

struct Warp {
    std::byte* registers = nullptr;
    std::byte* local = nullptr;
    size_t local_bytes = 0;
    const BlockState* block = nullptr;
    uint32_t alive = 0;
    unsigned split_count = 0;
    std::array<Split, kLanes> splits;
    uint64_t steps = 0;     // basic blocks run while diverged
    uint32_t favoured = 0;  // the lane that runs now for fairness' sake, while `steps` is below
    uint64_t favoured_until = 0;
    std::array<std::vector<Frame>, kLanes> calls;

    template <class T>
    T* slot(uint32_t offset) const {
        return reinterpret_cast<T*>(registers + offset);
    }
};

struct Barrier {
    uint32_t arrived = 0;
    uint32_t expected = 0;  // 0: every thread of the block that has not exited
    uint32_t votes = 0;     // lanes whose predicate of a reduction holds
};

// What the operations may ask of the block they run in.
struct BlockState {
    const Launch* launch = nullptr;
    std::byte* shared = nullptr;
    size_t shared_bytes = 0;
};

}  // namespace phos::ptx
