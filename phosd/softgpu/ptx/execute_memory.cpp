// Loads and stores.
#include "address.h"

namespace phos::ptx::PHOS_ISA {
namespace {

// T is the element in memory; registers hold it sign- or zero-extended to a lane.
template <class T>
void load(const Op& op, Warp& warp, uint32_t mask) {
    const Access& access = *op.access;
    Resolved at;
    resolve(access, warp, mask, false, at);
    for (unsigned c = 0; c < access.count; ++c) {
        Lane<T>* d = warp.slot<Lane<T>>(access.slots[c]);
        T values[kLanes];
        if (at.dense && access.count == 1) {
            std::memcpy(values, reinterpret_cast<const void*>(at.host[0]), sizeof values);
        } else {
            for (unsigned i = 0; i < kLanes; ++i)
                std::memcpy(&values[i], reinterpret_cast<const T*>(at.host[i]) + c, sizeof(T));
        }
        if (mask == kAllLanes) {
            for (unsigned i = 0; i < kLanes; ++i) d[i] = put<T>(values[i]);
        } else {
            for (unsigned i = 0; i < kLanes; ++i) d[i] = mask >> i & 1 ? put<T>(values[i]) : d[i];
        }
    }
}

template <class T>
void store(const Op& op, Warp& warp, uint32_t mask) {
    const Access& access = *op.access;
    Resolved at;
    resolve(access, warp, mask, true, at);
    if (mask == kAllLanes && at.dense && access.count == 1) {
        const Lane<T>* a = warp.slot<Lane<T>>(access.slots[0]);
        T values[kLanes];
        for (unsigned i = 0; i < kLanes; ++i) values[i] = static_cast<T>(a[i]);
        std::memcpy(reinterpret_cast<void*>(at.host[0]), values, sizeof values);
        return;
    }
    for (unsigned c = 0; c < access.count; ++c) {
        const Lane<T>* a = warp.slot<Lane<T>>(access.slots[c]);
        for (uint32_t rest = mask; rest; rest &= rest - 1) {
            const auto i = static_cast<unsigned>(__builtin_ctz(rest));
            const T value = static_cast<T>(a[i]);
            std::memcpy(reinterpret_cast<T*>(at.host[i]) + c, &value, sizeof(T));
        }
    }
}

// A kernel's parameter at a fixed place is the same for every lane.
template <class T>
void load_parameter(const Op& op, Warp& warp, uint32_t mask) {
    const Access& access = *op.access;
    const std::byte* at = warp.block->launch->parameters + access.offset;
    for (unsigned c = 0; c < access.count; ++c) {
        T value;
        std::memcpy(&value, at + c * sizeof(T), sizeof value);
        Lane<T>* d = warp.slot<Lane<T>>(access.slots[c]);
        const Lane<T> lane = put<T>(value);
        for (unsigned i = 0; i < kLanes; ++i) d[i] = mask >> i & 1 ? lane : d[i];
    }
}

// cp.async, done at once: op.access is the shared side, op.a the slot of the global address and
// op.b the slot of how many bytes to read; the rest is zero.
void copy(const Op& op, Warp& warp, uint32_t mask) {
    const Access& to = *op.access;
    Resolved target;
    resolve(to, warp, mask, true, target);
    const auto address = read<uint64_t>(warp, op.a);
    const auto size = read<uint32_t>(warp, op.b);
    const Launch& launch = *warp.block->launch;
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const auto i = static_cast<unsigned>(__builtin_ctz(rest));
        const uint32_t bytes = size[i] < to.element ? size[i] : to.element;
        if (bytes && !launch.memory->allows(address[i], bytes, launch.device, false))
            bad_address(CUDA_ERROR_ILLEGAL_ADDRESS, address[i], bytes, Space::global, false);
        if (address[i] % to.element)
            bad_address(CUDA_ERROR_MISALIGNED_ADDRESS, address[i], to.element, Space::global,
                        false);
        auto* d = reinterpret_cast<std::byte*>(target.host[i]);
        if (bytes) std::memcpy(d, reinterpret_cast<const void*>(address[i]), bytes);
        std::memset(d + bytes, 0, to.element - bytes);
        if (launch.trace && bytes) launch.trace->record(address[i], bytes, false);
    }
}

void fence(const Op&, Warp&, uint32_t) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#define PHOS_LOADS(name, F)                                                        \
    {name ".u8", F<uint8_t>}, {name ".s8", F<int8_t>}, {name ".u16", F<uint16_t>}, \
        {name ".s16", F<int16_t>}, {name ".b32", F<uint32_t>}, {                   \
        name ".b64", F<uint64_t>                                                   \
    }

const HandlerEntry kHandlers[] = {
    PHOS_LOADS("ld", load),
    PHOS_LOADS("ldparam", load_parameter),
    {"st.b8", store<uint8_t>},
    {"st.b16", store<uint16_t>},
    {"st.b32", store<uint32_t>},
    {"st.b64", store<uint64_t>},
    {"copy", copy},
    {"fence", fence},
};

}  // namespace

HandlerTable memory_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
