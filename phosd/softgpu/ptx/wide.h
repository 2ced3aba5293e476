// Integers of twice the width, and products in them. Compiled with the operations: once for each
// instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

namespace phos::ptx::PHOS_ISA {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
struct WiderOf;
template <>
struct WiderOf<uint8_t> {
    using type = uint16_t;
};
template <>
struct WiderOf<uint16_t> {
    using type = uint32_t;
};
template <>
struct WiderOf<uint32_t> {
    using type = uint64_t;
};
template <>
struct WiderOf<int16_t> {
    using type = int32_t;
};
template <>
struct WiderOf<int32_t> {
    using type = int64_t;
};
__extension__ using Wide128 = __int128;
__extension__ using UWide128 = unsigned __int128;
template <>
struct WiderOf<uint64_t> {
    using type = UWide128;
};
template <>
struct WiderOf<int64_t> {
    using type = Wide128;
};
template <class T>
using Wider = typename WiderOf<T>::type;

// The product of two T in twice the width. Signed products of narrow types fit without overflow.
template <class T>
[[gnu::always_inline]] inline Wider<T> product(T a, T b) {
    return static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b);
}
template <class T>
[[gnu::always_inline]] inline T high(T a, T b) {
    return static_cast<T>(product(a, b) >> (8 * sizeof(T)));
}

}  // namespace phos::ptx::PHOS_ISA
