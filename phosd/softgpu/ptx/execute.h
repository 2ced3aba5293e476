// What the files of operations share: reading and writing the lanes of slots.
//
// These files are compiled once for each instruction set (PHOS_ISA names the namespace); the
// decoder takes the best set that the processor has. Nothing here may have external linkage
// outside that namespace, or the linker would mix the sets.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "handlers.h"
#include "warp.h"

#ifndef PHOS_ISA
#error "PHOS_ISA names the instruction set's namespace"
#endif

namespace phos::ptx::PHOS_ISA {
namespace {

template <class T>
using Lane = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class To, class From>
[[gnu::always_inline]] inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Registers narrower than a lane leave its upper bits undefined; reading cuts them off.
template <class T>
[[gnu::always_inline]] inline T get(Lane<T> lane) {
    if constexpr (std::is_floating_point_v<T>)
        return bits_as<T>(lane);
    else
        return static_cast<T>(lane);
}

template <class T>
[[gnu::always_inline]] inline Lane<T> put(T value) {
    if constexpr (std::is_floating_point_v<T>)
        return bits_as<Lane<T>>(value);
    else
        return static_cast<Lane<T>>(value);
}

// d[i] = value(i) in the lanes of `mask`. Lanes are independent and `value` has no effects, so the
// masked form computes all of them and blends, which vectorises.
template <class R, class Value>
[[gnu::always_inline]] inline void each(const Op& op, Warp& warp, uint32_t mask, Value value) {
    Lane<R>* d = warp.slot<Lane<R>>(op.d);
    if (mask == kAllLanes) {
#pragma GCC ivdep
        for (unsigned i = 0; i < kLanes; ++i) d[i] = put<R>(value(i));
    } else {
#pragma GCC ivdep
        for (unsigned i = 0; i < kLanes; ++i) {
            const Lane<R> result = put<R>(value(i));
            d[i] = (mask >> i & 1) ? result : d[i];
        }
    }
}

// The same where `value` is costly or would fault in an idle lane.
template <class R, class Value>
[[gnu::always_inline]] inline void each_active(const Op& op, Warp& warp, uint32_t mask,
                                               Value value) {
    Lane<R>* d = warp.slot<Lane<R>>(op.d);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const unsigned i = static_cast<unsigned>(__builtin_ctz(rest));
        d[i] = put<R>(value(i));
    }
}

template <class Test>
[[gnu::always_inline]] inline uint32_t test_lanes(Test test) {
    uint32_t bits = 0;
    for (unsigned i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(test(i)) << i;
    return bits;
}

[[gnu::always_inline]] inline void set_predicate(Warp& warp, uint32_t slot, uint32_t mask,
                                                 uint32_t bits) {
    uint32_t* predicate = warp.slot<uint32_t>(slot);
    *predicate = (*predicate & ~mask) | (bits & mask);
}

template <class T>
struct Lanes {
    const Lane<T>* at;
    [[gnu::always_inline]] T operator[](unsigned i) const { return get<T>(at[i]); }
};

template <class T>
[[gnu::always_inline]] inline Lanes<T> read(const Warp& warp, uint32_t slot) {
    return {warp.slot<Lane<T>>(slot)};
}

// Handlers made from a function object F with a static `apply`.
template <class F, class R, class A = R>
void unary(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<A>(warp, op.a);
    each<R>(op, warp, mask, [&](unsigned i) { return static_cast<R>(F::apply(a[i])); });
}

template <class F, class R, class A = R, class B = A>
void binary(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<A>(warp, op.a);
    const auto b = read<B>(warp, op.b);
    each<R>(op, warp, mask, [&](unsigned i) { return static_cast<R>(F::apply(a[i], b[i])); });
}

template <class F, class R, class A = R, class B = A, class C = R>
void ternary(const Op& op, Warp& warp, uint32_t mask) {
    const auto a = read<A>(warp, op.a);
    const auto b = read<B>(warp, op.b);
    const auto c = read<C>(warp, op.c);
    each<R>(op, warp, mask, [&](unsigned i) { return static_cast<R>(F::apply(a[i], b[i], c[i])); });
}

}  // namespace
}  // namespace phos::ptx::PHOS_ISA
