// Calls, returns and indexed branches of a block's lanes.
#include <algorithm>
#include <cstring>

#include "block.h"

namespace phos::ptx {

std::byte* BlockRunner::local(const Warp& warp, unsigned lane, uint32_t offset) const {
    return warp.local + lane * warp.local_bytes + offset;
}

// The split goes where its first lane goes; lanes that go elsewhere become splits of their own.
void BlockRunner::scatter(Warp& warp, Split& split, const std::array<uint32_t, kLanes>& targets) {
    uint32_t rest = split.mask;
    bool first = true;
    while (rest) {
        const uint32_t target = targets[static_cast<unsigned>(__builtin_ctz(rest))];
        uint32_t group = 0;
        for (unsigned i = 0; i < kLanes; ++i)
            if ((rest >> i & 1) && targets[i] == target) group |= 1u << i;
        rest &= ~group;
        if (first) {
            split.block = target;
            split.mask = group;
            first = false;
        } else {
            add_split(warp, target, group);
        }
    }
}

void BlockRunner::branch_indexed(const Block& block, Warp& warp, Split& split) {
    const uint32_t* index = warp.slot<uint32_t>(block.index);
    const std::vector<uint32_t>& list = program_.targets[block.extra];
    std::array<uint32_t, kLanes> targets{};
    for (unsigned i = 0; i < kLanes; ++i) {
        if (!(split.mask >> i & 1)) continue;
        if (index[i] >= list.size())
            throw Fault{
                CUDA_ERROR_ILLEGAL_INSTRUCTION,
                "brx.idx beyond its list of targets (PTX line " + std::to_string(block.line) + ")"};
        targets[i] = list[index[i]];
    }
    scatter(warp, split, targets);
}

void BlockRunner::call(const Block& block, Warp& warp, Split& split, uint32_t function) {
    const CallSite& site = program_.call_sites[block.extra];
    const FunctionCode& callee = program_.functions[function];
    if (callee.builtin != Builtin::none) {
        call_builtin(site, callee.builtin, warp, split.mask);
        split.block = site.return_block;
        return;
    }
    uint32_t* frames = warp.slot<uint32_t>(program_.frame_slot);
    for (uint32_t rest = split.mask; rest; rest &= rest - 1) {
        const auto lane = static_cast<unsigned>(__builtin_ctz(rest));
        const uint32_t from = frames[lane], to = from + site.frame_bytes;
        if (to + uint64_t{callee.frame_bytes} > warp.local_bytes)
            throw Fault{CUDA_ERROR_ILLEGAL_ADDRESS, "stack overflow in " + callee.name +
                                                        " (PTX line " + std::to_string(block.line) +
                                                        ")"};
        warp.calls[lane].push_back({block.extra, function, from, {}});
        std::vector<uint64_t>& saved = warp.calls[lane].back().saved;
        if (callee.recursive) {
            for (const uint32_t slot : callee.saved32)
                saved.push_back(warp.slot<uint32_t>(slot)[lane]);
            for (const uint32_t slot : callee.saved64)
                saved.push_back(warp.slot<uint64_t>(slot)[lane]);
            for (const uint32_t slot : callee.saved_predicates)
                saved.push_back(*warp.slot<uint32_t>(slot) >> lane & 1);
        }
        for (size_t i = 0; i < site.arguments.size(); ++i)
            std::memcpy(local(warp, lane, to + callee.parameters[i].first),
                        local(warp, lane, from + site.arguments[i].first),
                        site.arguments[i].second);
        frames[lane] = to;
    }
    split.block = callee.entry_block;
}

void BlockRunner::call_indirect(const Block& block, Warp& warp, Split& split) {
    const uint64_t* addresses = warp.slot<uint64_t>(block.index);
    const uint64_t address = addresses[__builtin_ctz(split.mask)];
    const uint64_t index = address & ~kWindowMask;
    const CallSite& site = program_.call_sites[block.extra];
    int32_t function = -1;
    if ((address & kWindowMask) == kFunctionWindow && index < program_.function_of_address.size())
        function = program_.function_of_address[index];
    bool fits = function > 0;  // 0 is the kernel
    if (fits) {
        const FunctionCode& callee = program_.functions[static_cast<size_t>(function)];
        const auto same = [](const auto& a, const auto& b) {
            return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                              [](const auto& x, const auto& y) { return x.second == y.second; });
        };
        fits = callee.builtin == Builtin::none && same(callee.parameters, site.arguments) &&
               same(callee.results, site.results);
    }
    if (!fits)
        throw Fault{CUDA_ERROR_INVALID_PC,
                    "a call to something that is no such function (PTX line " +
                        std::to_string(block.line) + ")"};
    uint32_t group = 0;
    for (unsigned i = 0; i < kLanes; ++i)
        if ((split.mask >> i & 1) && addresses[i] == address) group |= 1u << i;
    // The other lanes make their call when their turn comes.
    add_split(warp, split.block, split.mask & ~group);
    split.mask = group;
    call(block, warp, split, static_cast<uint32_t>(function));
}

void BlockRunner::return_from(Warp& warp, Split& split) {
    uint32_t* frames = warp.slot<uint32_t>(program_.frame_slot);
    std::array<uint32_t, kLanes> targets{};
    for (uint32_t rest = split.mask; rest; rest &= rest - 1) {
        const auto lane = static_cast<unsigned>(__builtin_ctz(rest));
        const Frame& frame = warp.calls[lane].back();
        const CallSite& site = program_.call_sites[frame.site];
        const FunctionCode& callee = program_.functions[frame.function];
        for (size_t i = 0; i < site.results.size(); ++i)
            std::memcpy(local(warp, lane, frame.frame + site.results[i].first),
                        local(warp, lane, frames[lane] + callee.results[i].first),
                        site.results[i].second);
        if (callee.recursive) {
            auto next = frame.saved.begin();
            for (const uint32_t slot : callee.saved32)
                warp.slot<uint32_t>(slot)[lane] = static_cast<uint32_t>(*next++);
            for (const uint32_t slot : callee.saved64) warp.slot<uint64_t>(slot)[lane] = *next++;
            for (const uint32_t slot : callee.saved_predicates) {
                uint32_t* predicate = warp.slot<uint32_t>(slot);
                *predicate = (*predicate & ~(1u << lane)) | static_cast<uint32_t>(*next++) << lane;
            }
        }
        frames[lane] = frame.frame;
        targets[lane] = site.return_block;
        warp.calls[lane].pop_back();
    }
    scatter(warp, split, targets);
}

void BlockRunner::call_builtin(const CallSite& site, Builtin builtin, Warp& warp, uint32_t mask) {
    const uint32_t* frames = warp.slot<uint32_t>(program_.frame_slot);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const auto lane = static_cast<unsigned>(__builtin_ctz(rest));
        const auto thread = static_cast<unsigned>(&warp - warps_.data()) * kLanes + lane;
        const Dim3& block = launch_.block;
        const Caller caller{
            launch_,
            index_,
            {thread % block.x, thread / block.x % block.y, thread / block.x / block.y},
            local(warp, lane, 0),
            warp.local_bytes};
        const auto argument = [&](size_t i) {
            uint64_t value = 0;
            std::memcpy(&value, local(warp, lane, frames[lane] + site.arguments[i].first),
                        std::min<size_t>(sizeof value, site.arguments[i].second));
            return value;
        };
        if (builtin == Builtin::assertfail)
            assertion_failed(caller, argument(0), argument(1), static_cast<uint32_t>(argument(2)),
                             argument(3));
        const uint32_t result = device_printf(caller, argument(0), argument(1));
        std::memcpy(local(warp, lane, frames[lane] + site.results[0].first), &result,
                    sizeof result);
    }
}

}  // namespace phos::ptx
