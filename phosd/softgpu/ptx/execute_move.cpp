// Moves, packing and unpacking, the address windows, clocks.
#include <time.h>

#include "execute.h"

namespace phos::ptx::PHOS_ISA {
namespace {

struct Same {
    template <class T>
    static T apply(T a) {
        return a;
    }
};
struct Pack16 {
    static uint32_t apply(uint32_t low, uint32_t top) { return (low & 0xffff) | top << 16; }
};
struct Pack8 {
    static uint32_t apply(uint32_t low, uint32_t top) { return (low & 0xff) | (top & 0xff) << 8; }
};
struct Pack32 {
    static uint64_t apply(uint32_t low, uint32_t top) { return low | uint64_t{top} << 32; }
};
struct High32 {
    static uint32_t apply(uint64_t v) { return static_cast<uint32_t>(v >> 32); }
};
struct High16 {
    static uint32_t apply(uint32_t v) { return v >> 16; }
};
struct Low16 {
    static uint32_t apply(uint32_t v) { return v & 0xffff; }
};
struct High8 {
    static uint32_t apply(uint32_t v) { return v >> 8 & 0xff; }
};
struct Low8 {
    static uint32_t apply(uint32_t v) { return v & 0xff; }
};

// cvta adds the window at op.value; cvta.to takes any window off.
void to_generic(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<uint64_t>(warp, op.a);
    const uint64_t window = op.value;
    each<uint64_t>(op, warp, mask, [&](unsigned i) { return a[i] | window; });
}
void from_generic(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<uint64_t>(warp, op.a);
    each<uint64_t>(op, warp, mask, [&](unsigned i) { return a[i] & ~kWindowMask; });
}
void is_space(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<uint64_t>(warp, op.a);
    const uint64_t window = op.value;
    set_predicate(warp, op.d, mask,
                  test_lanes([&](unsigned i) { return (a[i] & kWindowMask) == window; }));
}

// op.value: 0 processor cycles, 1 nanoseconds of the wall clock.
template <class T>
void clock_value(const Op& op, Warp& warp, uint32_t mask) {
    timespec now{};
    ::clock_gettime(op.value ? CLOCK_REALTIME : CLOCK_MONOTONIC, &now);
    const uint64_t value =
        static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
    each<T>(op, warp, mask, [&](unsigned) { return static_cast<T>(value); });
}

void nanosleep_for(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<uint32_t>(warp, op.a);
    uint32_t longest = 0;
    for (unsigned i = 0; i < kLanes; ++i)
        if ((mask >> i & 1) && a[i] > longest) longest = a[i];
    const timespec wait{0, static_cast<long>(longest < 1'000'000 ? longest : 1'000'000)};
    ::nanosleep(&wait, nullptr);
}

void nothing(const Op&, Warp&, uint32_t) {}

const HandlerEntry kHandlers[] = {
    {"mov.b16", unary<Same, uint32_t>},
    {"mov.b32", unary<Same, uint32_t>},
    {"mov.b64", unary<Same, uint64_t>},
    {"pack.b16", binary<Pack8, uint32_t>},
    {"pack.b32", binary<Pack16, uint32_t>},
    {"pack.b64", binary<Pack32, uint64_t, uint32_t>},
    {"low.b16", unary<Low8, uint32_t>},
    {"high.b16", unary<High8, uint32_t>},
    {"low.b32", unary<Low16, uint32_t>},
    {"high.b32", unary<High16, uint32_t>},
    {"high.b64", unary<High32, uint32_t, uint64_t>},
    {"to_generic", to_generic},
    {"from_generic", from_generic},
    {"is_space", is_space},
    {"clock.b32", clock_value<uint32_t>},
    {"clock.b64", clock_value<uint64_t>},
    {"nanosleep", nanosleep_for},
    {"nothing", nothing},
};

}  // namespace

HandlerTable move_handlers() {
    return {kHandlers, sizeof kHandlers / sizeof *kHandlers};
}

}  // namespace phos::ptx::PHOS_ISA
