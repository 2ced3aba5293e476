// From a lane's address to the host memory behind it, with the device's checks.
#pragma once

#include "execute.h"

namespace phos::ptx::PHOS_ISA {
namespace {

struct Resolved {
    uint64_t raw[kLanes];   // as the program computed it; idle lanes repeat an active one
    uint64_t host[kLanes];  // where it lies in this process
    bool dense;             // every lane follows the one before it
};

// The whole warp lies in one span most of the time: one question to the table answers for all.
inline void check_global(const Warp& warp, const uint64_t* raw, uint64_t bytes, bool write) {
    uint64_t low = raw[0], top = raw[0];
    for (unsigned i = 0; i < kLanes; ++i) {
        low = raw[i] < low ? raw[i] : low;
        top = raw[i] > top ? raw[i] : top;
    }
    const Launch& launch = *warp.block->launch;
    constexpr uint64_t kSpan = uint64_t{1} << softgpu::AddressSpace::kPageShift;
    if (top - low < kSpan && launch.memory->allows(low, top - low + bytes, launch.device, write))
        return;
    for (unsigned i = 0; i < kLanes; ++i)
        if (raw[i] > UINT64_MAX - bytes ||
            !launch.memory->allows(raw[i], bytes, launch.device, write))
            bad_address(CUDA_ERROR_ILLEGAL_ADDRESS, raw[i], bytes, Space::global, write);
}

inline uint64_t resolve_window(const Warp& warp, unsigned lane, uint64_t offset, uint64_t bytes,
                               Space space, bool write) {
    uint64_t base, size;
    if (space == Space::shared) {
        base = reinterpret_cast<uint64_t>(warp.block->shared);
        size = warp.block->shared_bytes;
    } else if (space == Space::local) {
        base = reinterpret_cast<uint64_t>(warp.local) + lane * warp.local_bytes;
        size = warp.local_bytes;
    } else {
        base = reinterpret_cast<uint64_t>(warp.block->launch->parameters);
        size = warp.block->launch->kernel->parameter_bytes;
    }
    if (bytes > size || offset > size - bytes || (write && space == Space::param))
        bad_address(CUDA_ERROR_ILLEGAL_ADDRESS, offset, bytes, space, write);
    return base + offset;
}

inline void record(const Warp& warp, const Resolved& at, uint32_t mask, uint32_t bytes,
                   bool write) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const auto i = static_cast<unsigned>(__builtin_ctz(rest));
        if ((at.raw[i] & kWindowMask) == 0)
            warp.block->launch->trace->record(at.raw[i], bytes, write);
    }
}

inline void resolve(const Access& access, const Warp& warp, uint32_t mask, bool write,
                    Resolved& at) {
    const uint64_t bytes = uint64_t{access.element} * access.count;
    const auto offset = static_cast<uint64_t>(access.offset);
    if (!access.based) {
        for (unsigned i = 0; i < kLanes; ++i) at.raw[i] = offset;
    } else if (access.wide_base) {
        const uint64_t* base = warp.slot<uint64_t>(access.base);
        for (unsigned i = 0; i < kLanes; ++i) at.raw[i] = base[i] + offset;
    } else {
        const uint32_t* base = warp.slot<uint32_t>(access.base);
        // 32-bit addresses wrap within their space.
        for (unsigned i = 0; i < kLanes; ++i) at.raw[i] = static_cast<uint32_t>(base[i] + offset);
    }
    if (mask != kAllLanes) {
        const uint64_t first = at.raw[__builtin_ctz(mask)];
        for (unsigned i = 0; i < kLanes; ++i) at.raw[i] = mask >> i & 1 ? at.raw[i] : first;
    }
    uint64_t all = 0, apart = 0;
    for (unsigned i = 0; i < kLanes; ++i) {
        all |= at.raw[i];
        apart |= at.raw[i] ^ (at.raw[0] + i * bytes);
    }
    at.dense = apart == 0;
    if (all & (bytes - 1)) {
        for (unsigned i = 0; i < kLanes; ++i)
            if (at.raw[i] & (bytes - 1))
                bad_address(CUDA_ERROR_MISALIGNED_ADDRESS, at.raw[i], bytes, access.space, write);
    }
    const bool global = access.space == Space::global || access.space == Space::constant ||
                        (access.space == Space::generic && (all & kWindowMask) == 0);
    if (global) {
        check_global(warp, at.raw, bytes, write);
        for (unsigned i = 0; i < kLanes; ++i) at.host[i] = at.raw[i];
    } else if (access.space == Space::shared) {
        const uint64_t size = warp.block->shared_bytes;
        const auto base = reinterpret_cast<uint64_t>(warp.block->shared);
        uint64_t top = 0;
        for (unsigned i = 0; i < kLanes; ++i) {
            top = at.raw[i] > top ? at.raw[i] : top;
            at.host[i] = base + at.raw[i];
        }
        if (bytes > size || top > size - bytes)
            bad_address(CUDA_ERROR_ILLEGAL_ADDRESS, top, bytes, Space::shared, write);
        return;
    } else {
        at.dense = false;
        for (uint32_t rest = mask; rest; rest &= rest - 1) {
            const auto i = static_cast<unsigned>(__builtin_ctz(rest));
            const uint64_t window = at.raw[i] & kWindowMask, inside = at.raw[i] & ~kWindowMask;
            const Launch& launch = *warp.block->launch;
            if (access.space != Space::generic)
                at.host[i] = resolve_window(warp, i, at.raw[i], bytes, access.space, write);
            else if (window == kSharedWindow)
                at.host[i] = resolve_window(warp, i, inside, bytes, Space::shared, write);
            else if (window == kLocalWindow)
                at.host[i] = resolve_window(warp, i, inside, bytes, Space::local, write);
            else if (window == kParamWindow)
                at.host[i] = resolve_window(warp, i, inside, bytes, Space::param, write);
            else if (window == 0 && launch.memory->allows(at.raw[i], bytes, launch.device, write))
                at.host[i] = at.raw[i];
            else
                bad_address(CUDA_ERROR_ILLEGAL_ADDRESS, at.raw[i], bytes, Space::generic, write);
        }
        const uint64_t first = at.host[__builtin_ctz(mask)];
        for (unsigned i = 0; i < kLanes; ++i) at.host[i] = mask >> i & 1 ? at.host[i] : first;
        if (access.space != Space::generic) return;
    }
    if (__builtin_expect(warp.block->launch->trace != nullptr, 0))
        record(warp, at, mask, static_cast<uint32_t>(bytes), write);
}

}  // namespace
}  // namespace phos::ptx::PHOS_ISA
