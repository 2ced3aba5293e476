#include "block.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace phos::ptx {
namespace {

// Basic blocks that a warp may run before the next one has its turn.
constexpr int64_t kTurn = 2048;
// A diverged warp lets the split that waited longest run this often, for this long: lanes that
// spin for other lanes of their warp would otherwise never see them come.
constexpr uint64_t kFairEvery = 4096, kFairFor = 64;

Dim3 place(uint64_t number, const Dim3& extent) {
    return {static_cast<unsigned>(number % extent.x),
            static_cast<unsigned>(number / extent.x % extent.y),
            static_cast<unsigned>(number / extent.x / extent.y)};
}

}  // namespace

void BlockRunner::Free::operator()(std::byte* memory) const {
    std::free(memory);
}

BlockRunner::Memory BlockRunner::allocate(size_t bytes) {
    // Zeroed by the system page by page: what is never touched costs nothing.
    auto* memory = static_cast<std::byte*>(std::calloc(1, bytes + 64));
    if (!memory) throw Fault{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "no host memory for a block"};
    return Memory(memory);
}

BlockRunner::BlockRunner(const Launch& launch, const Program& program, uint32_t grid)
    : launch_(launch),
      program_(program),
      threads_(launch.block.x * launch.block.y * launch.block.z) {
    const size_t count = (threads_ + kLanes - 1) / kLanes;
    state_.launch = &launch;
    state_.shared_bytes = program.static_shared_bytes + launch.dynamic_shared_bytes;
    registers_ = allocate(program.register_bytes * count);
    local_ = allocate(program.local_bytes * kLanes * count);
    shared_ = allocate(state_.shared_bytes);
    const auto aligned = [](const Memory& memory) {
        return memory.get() + (64 - reinterpret_cast<uint64_t>(memory.get()) % 64);
    };
    state_.shared = aligned(shared_);
    warps_.resize(count);
    for (size_t i = 0; i < count; ++i) {
        Warp& warp = warps_[i];
        warp.registers = aligned(registers_) + i * program.register_bytes;
        warp.local = aligned(local_) + i * program.local_bytes * kLanes;
        warp.local_bytes = program.local_bytes;
        warp.block = &state_;
        *warp.slot<uint32_t>(program.predicate_always) = kAllLanes;
        for (const Constant& constant : program.constants) {
            if (constant.wide)
                std::fill_n(warp.slot<uint64_t>(constant.slot), kLanes, constant.bits);
            else
                std::fill_n(warp.slot<uint32_t>(constant.slot), kLanes,
                            static_cast<uint32_t>(constant.bits));
        }
    }
    set_fixed_specials(grid);
}

uint64_t BlockRunner::take_instructions() {
    return std::exchange(instructions_, 0);
}

void BlockRunner::start(uint64_t number) {
    index_ = place(number, launch_.grid);
    set_block_specials();
    alive_ = threads_;
    barriers_ = {};
    for (size_t i = 0; i < warps_.size(); ++i) {
        Warp& warp = warps_[i];
        const size_t left = threads_ - i * kLanes;
        warp.alive = left >= kLanes ? kAllLanes : (1u << left) - 1;
        warp.split_count = 0;
        warp.steps = warp.favoured_until = 0;
        for (auto& calls : warp.calls) calls.clear();
        add_split(warp, program_.entry_block, warp.alive);
    }
}

bool BlockRunner::run(softgpu::MemoryUsers::Use& use) {
    bool progress = false;
    for (Warp& warp : warps_) {
        budget_ = kTurn;
        run_warp(warp);
        use.pause();
        progress |= budget_ < kTurn;
    }
    if (alive_ == 0) return true;
    if (!progress && !break_deadlock())
        throw Fault{CUDA_ERROR_LAUNCH_FAILED,
                    "every thread waits at a barrier that others never reach"};
    return false;
}

// Nothing can go on: lanes that wait for others of their warp go without them.
bool BlockRunner::break_deadlock() {
    for (Warp& warp : warps_) {
        for (unsigned i = 0; i < warp.split_count; ++i) {
            Split& split = warp.splits[i];
            if (split.state == Split::State::at_barrier) continue;
            split.forced = split.state == Split::State::converging;
            split.state = Split::State::ready;
            return true;
        }
    }
    return false;
}

void BlockRunner::run_warp(Warp& warp) {
    while (warp.split_count && budget_ > 0) {
        Split* split = choose(warp);
        if (!split) return;
        run_split(warp, *split);
    }
}

// The deepest, then the earliest place first: those ahead wait for those behind, and join them.
Split* BlockRunner::choose(Warp& warp) {
    if (warp.split_count == 1 && warp.splits[0].state == Split::State::ready)
        return &warp.splits[0];
    merge(warp);
    Split* best = nullptr;
    Split* oldest = nullptr;
    bool at_barrier = false;
    size_t best_depth = 0;
    for (unsigned i = 0; i < warp.split_count; ++i) {
        Split& split = warp.splits[i];
        at_barrier |= split.state == Split::State::at_barrier;
        if (split.state != Split::State::ready) continue;
        if (warp.steps < warp.favoured_until && (split.mask & warp.favoured)) return &split;
        const size_t depth = warp.calls[static_cast<unsigned>(__builtin_ctz(split.mask))].size();
        if (!best || depth > best_depth || (depth == best_depth && split.block < best->block)) {
            best = &split;
            best_depth = depth;
        }
        if (!oldest || split.stamp < oldest->stamp) oldest = &split;
    }
    if (!best) {
        if (at_barrier) return nullptr;
        best = std::min_element(warp.splits.begin(), warp.splits.begin() + warp.split_count,
                                [](const Split& a, const Split& b) { return a.block < b.block; });
        best->state = Split::State::ready;
        best->forced = true;
        return best;
    }
    if (oldest != best && warp.steps >= warp.favoured_until + kFairEvery) {
        warp.favoured = oldest->mask & (0 - oldest->mask);
        warp.favoured_until = warp.steps + kFairFor;
        return oldest;
    }
    return best;
}

void BlockRunner::merge(Warp& warp) {
    for (unsigned i = 0; i < warp.split_count; ++i) {
        Split& a = warp.splits[i];
        if (a.state == Split::State::at_barrier) continue;
        for (unsigned j = i + 1; j < warp.split_count;) {
            Split& b = warp.splits[j];
            if (a.block != b.block || b.state == Split::State::at_barrier) {
                ++j;
                continue;
            }
            a.mask |= b.mask;
            a.state = Split::State::ready;
            a.stamp = std::max(a.stamp, b.stamp);
            b = warp.splits[--warp.split_count];
        }
    }
}

void BlockRunner::add_split(Warp& warp, uint32_t block, uint32_t mask) {
    if (mask == 0) return;
    Split& fresh = warp.splits[warp.split_count++];
    fresh = {};
    fresh.block = block;
    fresh.mask = mask;
    fresh.stamp = clock_;
}

void BlockRunner::run_operations(const Block& block, Warp& warp, uint32_t mask) {
    const Op* op = program_.ops.data() + block.first;
    const Op* const end = program_.ops.data() + block.last;
    try {
        for (; op != end; ++op) {
            const uint32_t active = mask & (*warp.slot<uint32_t>(op->guard) ^ op->flip);
            if (active) op->run(*op, warp, active);
        }
    } catch (Fault& fault) {
        const auto at = static_cast<size_t>(op - program_.ops.data());
        fault.text += " (PTX line " + std::to_string(program_.lines[at]) + ")";
        throw;
    }
}

// Whether every lane that the next operation names has come.
bool BlockRunner::gathered(const Block& block, const Warp& warp, const Split& split) const {
    const uint32_t* members = warp.slot<uint32_t>(block.members);
    uint32_t needed = 0;
    for (unsigned i = 0; i < kLanes; ++i) needed |= split.mask >> i & 1 ? members[i] : 0;
    return (needed & warp.alive & ~split.mask) == 0;
}

void BlockRunner::run_split(Warp& warp, Split& split) {
    split.stamp = ++clock_;
    while (true) {
        const Block& block = program_.blocks[split.block];
        if (block.converge && warp.split_count > 1 && !split.forced &&
            !gathered(block, warp, split)) {
            split.state = Split::State::converging;
            return;
        }
        split.forced = false;
        run_operations(block, warp, split.mask);
        instructions_ += static_cast<uint64_t>(__builtin_popcount(split.mask)) *
                         (block.last - block.first + (block.end != End::next));
        --budget_;
        if (!finish(block, warp, split)) return;
        if (warp.split_count > 1) {
            ++warp.steps;
            return;
        }
        if (budget_ <= 0) return;
    }
}

bool BlockRunner::finish(const Block& block, Warp& warp, Split& split) {
    if (block.end == End::next) {
        ++split.block;
        return true;
    }
    const uint32_t taken = split.mask & (*warp.slot<uint32_t>(block.guard) ^ block.flip);
    if (taken == 0) {
        ++split.block;
        return true;
    }
    // The lanes whose guard does not hold pass by.
    add_split(warp, split.block + 1, split.mask & ~taken);
    split.mask = taken;
    switch (block.end) {
        case End::branch:
            split.block = block.target;
            return true;
        case End::indexed:
            branch_indexed(block, warp, split);
            return true;
        case End::call:
            call(block, warp, split, block.target);
            return true;
        case End::call_indirect:
            call_indirect(block, warp, split);
            return true;
        case End::ret:
            return_from(warp, split);
            return true;
        case End::exit:
            exit(warp, split);
            return false;
        case End::trap:
        case End::breakpoint:
            throw Fault{CUDA_ERROR_LAUNCH_FAILED,
                        std::string(block.end == End::trap ? "trap" : "brkpt") + " (PTX line " +
                            std::to_string(block.line) + ")"};
        default:
            arrive(block, warp, split);
            return false;
    }
}

void BlockRunner::exit(Warp& warp, Split& split) {
    warp.alive &= ~split.mask;
    alive_ -= static_cast<unsigned>(__builtin_popcount(split.mask));
    split = warp.splits[--warp.split_count];
    // Nobody waits for lanes that are gone.
    for (unsigned i = 0; i < warp.split_count; ++i)
        if (warp.splits[i].state == Split::State::converging)
            warp.splits[i].state = Split::State::ready;
    if (alive_)
        for (uint32_t number = 0; number < barriers_.size(); ++number) settle_barrier(number);
}

void BlockRunner::arrive(const Block& block, Warp& warp, Split& split) {
    const auto lane = static_cast<unsigned>(__builtin_ctz(split.mask));
    const uint32_t number = warp.slot<uint32_t>(block.index)[lane];
    if (number >= barriers_.size())
        throw Fault{CUDA_ERROR_ILLEGAL_INSTRUCTION, "there is no barrier " +
                                                        std::to_string(number) + " (PTX line " +
                                                        std::to_string(block.line) + ")"};
    Barrier& barrier = barriers_[number];
    if (block.counted) barrier.expected = warp.slot<uint32_t>(block.count)[lane];
    barrier.arrived += static_cast<uint32_t>(__builtin_popcount(split.mask));
    if (block.end != End::barrier_sync && block.end != End::barrier_arrive) {
        const uint32_t votes = *warp.slot<uint32_t>(block.source) ^ block.source_flip;
        barrier.votes += static_cast<uint32_t>(__builtin_popcount(split.mask & votes));
    }
    if (block.end != End::barrier_arrive) {
        split.state = Split::State::at_barrier;
        split.barrier = number;
        split.barrier_block = split.block;
    }
    ++split.block;
    settle_barrier(number);
}

void BlockRunner::settle_barrier(uint32_t number) {
    const Barrier& barrier = barriers_[number];
    if (barrier.arrived == 0) return;
    // A count is of whole warps; the last warp of a block may have fewer threads.
    const uint32_t expected = barrier.expected ? std::min(barrier.expected, threads_) : alive_;
    if (barrier.arrived >= expected) release(number);
}

void BlockRunner::release(uint32_t number) {
    const Barrier barrier = std::exchange(barriers_[number], {});
    for (Warp& warp : warps_) {
        for (unsigned i = 0; i < warp.split_count; ++i) {
            Split& split = warp.splits[i];
            if (split.state != Split::State::at_barrier || split.barrier != number) continue;
            split.state = Split::State::ready;
            const Block& block = program_.blocks[split.barrier_block];
            uint32_t* d = warp.slot<uint32_t>(block.d);
            if (block.end == End::barrier_popc) {
                for (unsigned lane = 0; lane < kLanes; ++lane)
                    if (split.mask >> lane & 1) d[lane] = barrier.votes;
            } else if (block.end == End::barrier_and || block.end == End::barrier_or) {
                const bool yes = block.end == End::barrier_and ? barrier.votes == barrier.arrived
                                                               : barrier.votes != 0;
                *d = yes ? *d | split.mask : *d & ~split.mask;
            }
        }
    }
}

}  // namespace phos::ptx
