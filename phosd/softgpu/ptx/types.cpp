#include "types.h"

#include <array>

namespace phos::ptx {
namespace {

struct Row {
    std::string_view name;
    unsigned size;
};

// In the order of the enum.
constexpr std::array<Row, 24> kTypes{{
    {"", 0},       {"pred", 0}, {"b8", 1},  {"b16", 2}, {"b32", 4},    {"b64", 8},
    {"b128", 16},  {"u8", 1},   {"u16", 2}, {"u32", 4}, {"u64", 8},    {"s8", 1},
    {"s16", 2},    {"s32", 4},  {"s64", 8}, {"f16", 2}, {"f16x2", 4},  {"bf16", 2},
    {"bf16x2", 4}, {"tf32", 4}, {"f32", 4}, {"f64", 8}, {"e4m3x2", 2}, {"e5m2x2", 2},
}};

}  // namespace

Type type_named(std::string_view name) {
    if (name.empty()) return Type::none;
    for (size_t i = 1; i < kTypes.size(); ++i)
        if (kTypes[i].name == name) return static_cast<Type>(i);
    return Type::none;
}

std::string_view name_of(Type type) {
    return kTypes[static_cast<size_t>(type)].name;
}
unsigned size_of(Type type) {
    return kTypes[static_cast<size_t>(type)].size;
}
bool is_signed(Type type) {
    return type >= Type::s8 && type <= Type::s64;
}
bool is_float(Type type) {
    return type >= Type::f16;
}

}  // namespace phos::ptx
