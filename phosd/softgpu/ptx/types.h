// The fundamental types of PTX and the state spaces of memory.
#pragma once

#include <cstdint>
#include <string_view>

namespace phos::ptx {

enum class Type : uint8_t {
    none,
    pred,
    b8,
    b16,
    b32,
    b64,
    b128,
    u8,
    u16,
    u32,
    u64,
    s8,
    s16,
    s32,
    s64,
    f16,
    f16x2,
    bf16,
    bf16x2,
    tf32,
    f32,
    f64,
    e4m3x2,
    e5m2x2,
};

enum class Space : uint8_t { none, reg, param, local, shared, global, constant, generic };

enum class Rounding : uint8_t { none, rn, rna, rz, rm, rp };

// The type that `.name` spells (without the dot), or Type::none.
Type type_named(std::string_view name);
std::string_view name_of(Type type);
// In bytes; a predicate has none of its own.
unsigned size_of(Type type);
bool is_signed(Type type);
bool is_float(Type type);  // f32, f64 and everything narrower

}  // namespace phos::ptx
