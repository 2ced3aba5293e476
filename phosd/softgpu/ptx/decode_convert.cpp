// mov, cvt, comparison and selection.
#include <algorithm>

#include "decode.h"

namespace phos::ptx {
namespace {

bool is_half(Type type) {
    return type == Type::f16 || type == Type::bf16;
}
bool is_pair(Type type) {
    return type == Type::f16x2 || type == Type::bf16x2 || type == Type::e4m3x2 ||
           type == Type::e5m2x2;
}
Type half_of(Type pair) {
    return pair == Type::f16x2 ? Type::f16 : Type::bf16;
}

}  // namespace

bool Decoder::conversion() {
    const std::string_view name = statement_->opcode;
    if (name == "mov") {
        move();
    } else if (name == "cvt") {
        convert();
    } else if (name == "setp") {
        compare(false);
    } else if (name == "set") {
        compare(true);
    } else if (name == "selp") {
        select();
    } else if (name == "slct") {
        select_by_sign();
    } else if (name == "testp") {
        need(2);
        Modifiers modifiers(*statement_);
        const std::string_view test = modifiers.take_any(
            {"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type);
        emit(handler("testp." + std::string(test), type), target_predicate(operand(0)), a);
    } else {
        return false;
    }
    return true;
}

void Decoder::move() {
    need(2);
    Modifiers modifiers(*statement_);
    const Type type = modifiers.required_type();
    modifiers.finish();
    const Operand &to = operand(0), &from = operand(1);
    if (type == Type::pred) {
        const uint32_t a = predicate(from);
        emit("or.pred", target_predicate(to), a, a, 0, from.negated ? 3 : 0);
    } else if (type == Type::b128) {
        const auto half = [&](const Operand& value, unsigned i) {
            if (value.kind == Kind::vector) {
                if (value.items.size() != 2) bad("takes two halves");
                return i < 2 && value.items[i].kind == Kind::sink
                           ? allocate(true)
                           : source(value.items[i], Type::b64);
            }
            if (value.kind != Kind::reg ||
                scope_->function->registers[value.reg].type != Type::b128)
                bad("needs a register of 128 bits");
            return scope_->register_slots[value.reg] + i * kLanes * 8;
        };
        for (unsigned i = 0; i < 2; ++i) emit("mov.b64", half(to, i), half(from, i));
    } else if (to.kind == Kind::vector && from.kind == Kind::vector) {
        bad("moves between two vectors");
    } else if (to.kind == Kind::vector) {
        unpack(to, source(from, type), type);
    } else {
        const uint32_t a = from.kind == Kind::vector ? pack(from, type) : source(from, type);
        const unsigned bits = std::max(16u, 8 * size_of(type));
        emit(("mov.b" + std::to_string(bits)).c_str(), target(to, type), a);
    }
}

uint32_t Decoder::pack(const Operand& vector, Type type) {
    const size_t count = vector.items.size();
    const unsigned bytes = size_of(type);
    if ((count != 2 && count != 4) || bytes / count == 0) bad("packs two or four parts");
    const unsigned part = bytes / static_cast<unsigned>(count);
    const Type part_type = part == 1 ? Type::b8 : part == 2 ? Type::b16 : Type::b32;
    std::vector<uint32_t> slots;
    for (const Operand& item : vector.items) slots.push_back(source(item, part_type));
    unsigned width = part;
    while (slots.size() > 1) {
        width *= 2;
        std::vector<uint32_t> joined;
        for (size_t i = 0; i < slots.size(); i += 2) {
            joined.push_back(allocate(width == 8));
            emit(("pack.b" + std::to_string(8 * width)).c_str(), joined.back(), slots[i],
                 slots[i + 1]);
        }
        slots = std::move(joined);
    }
    return slots[0];
}

void Decoder::unpack(const Operand& vector, uint32_t from, Type type) {
    const size_t count = vector.items.size();
    unsigned width = size_of(type);
    if ((count != 2 && count != 4) || width / count == 0) bad("unpacks two or four parts");
    std::vector<uint32_t> slots{from};
    while (slots.size() < count) {
        std::vector<uint32_t> split;
        const std::string bits = std::to_string(8 * width);
        for (const uint32_t slot : slots) {
            split.push_back(allocate(false));
            emit(width == 8 ? "cvt.u32.u64" : ("low.b" + bits).c_str(), split.back(), slot);
            split.push_back(allocate(false));
            emit(("high.b" + bits).c_str(), split.back(), slot);
        }
        width /= 2;
        slots = std::move(split);
    }
    const Type part_type = width == 1 ? Type::b8 : width == 2 ? Type::b16 : Type::b32;
    for (size_t i = 0; i < count; ++i)
        emit("mov.b32", target(vector.items[i], part_type), slots[i]);
}

// A half as f32, which holds it exactly.
uint32_t Decoder::widened(uint32_t slot, Type type) {
    if (!is_half(type)) return slot;
    const uint32_t wide = allocate(false);
    emit(type == Type::f16 ? "cvt.f32.f16" : "cvt.f32.bf16", wide, slot);
    return wide;
}

void Decoder::convert() {
    Modifiers modifiers(*statement_);
    Rounding rounding = modifiers.rounding();
    const std::string_view integral = modifiers.take_any({"rni", "rzi", "rmi", "rpi"});
    const bool flushes = modifiers.take("ftz");
    const bool saturates = modifiers.take("sat");
    const bool finite = modifiers.take("satfinite");
    const bool relu = modifiers.take("relu");
    Type to = modifiers.type(), from = modifiers.type();
    // e4m3x2 and e5m2x2 can stand on either side; `type()` takes them in order of appearance.
    if (to == Type::none || from == Type::none) bad("needs two types");
    modifiers.finish();
    if (integral == "rzi") rounding = Rounding::rz;
    if (integral == "rmi") rounding = Rounding::rm;
    if (integral == "rpi") rounding = Rounding::rp;
    if (integral == "rni" || rounding == Rounding::none) rounding = Rounding::rn;

    const std::string to_name(name_of(to)), from_name(name_of(from));
    const std::string ftz = flushes ? ".ftz" : "";
    const uint64_t how =
        static_cast<uint64_t>(rounding) | (finite ? 0x100 : 0) | (relu ? 0x200 : 0);

    if (is_pair(to) && !is_pair(from)) {
        // cvt.f16x2.f32 d, a, b: a becomes the upper half.
        need(3);
        if (from != Type::f32) unknown();
        const bool bytes = to == Type::e4m3x2 || to == Type::e5m2x2;
        const std::string part = to == Type::e4m3x2   ? "e4m3"
                                 : to == Type::e5m2x2 ? "e5m2"
                                                      : std::string(name_of(half_of(to)));
        const uint32_t a = source(1, from), b = source(2, from);
        const uint32_t top = allocate(false), low = allocate(false);
        emit(("narrow." + part + ".f32").c_str(), top, a, 0, 0, how | (bytes ? 0x100 : 0));
        emit(("narrow." + part + ".f32").c_str(), low, b, 0, 0, how | (bytes ? 0x100 : 0));
        emit(bytes ? "pack.b16" : "pack.b32", target(0, to), low, top);
        return;
    }
    need(2);
    const uint32_t a = source(1, from);
    if (is_pair(from) || is_pair(to)) {
        // Between pairs of bytes and pairs of f16.
        const bool widens = from == Type::e4m3x2 || from == Type::e5m2x2;
        if (widens ? to != Type::f16x2 : from != Type::f16x2 || is_half(to)) unknown();
        const std::string byte = (widens ? from : to) == Type::e4m3x2 ? "e4m3" : "e5m2";
        uint32_t parts[2];
        for (unsigned i = 0; i < 2; ++i) {
            const uint32_t part = allocate(false), real = allocate(false);
            parts[i] = allocate(false);
            const std::string cut = (i ? "high." : "low.") + std::string(widens ? "b16" : "b32");
            emit(cut.c_str(), part, a);
            emit(("cvt.f32." + (widens ? byte : "f16")).c_str(), real, part);
            emit(("narrow." + (widens ? "f16" : byte) + ".f32").c_str(), parts[i], real, 0, 0,
                 how | (widens ? 0 : 0x100));
        }
        emit(widens ? "pack.b32" : "pack.b16", target(0, to), parts[0], parts[1]);
        return;
    }
    const uint32_t d = target(0, to);
    if (!is_float(to) && !is_float(from)) {
        emit(((saturates ? "cvt.sat." : "cvt.") + to_name + "." + from_name).c_str(), d, a);
        return;
    }
    if (!is_float(from)) {
        const bool narrow = is_half(to);
        if (narrow) {
            const uint32_t wide = allocate(true);
            emit(((size_of(from) == 8 ? "odd.f64." : "cvt.f64.") + from_name).c_str(), wide, a);
            emit(("narrow." + to_name + ".f64").c_str(), d, wide, 0, 0, how);
        } else {
            if (rounding != Rounding::rn) set_rounding(rounding);
            emit(("cvt." + to_name + "." + from_name).c_str(), d, a);
            if (rounding != Rounding::rn) set_rounding(Rounding::rn);
        }
        if (saturates) emit(handler("saturate", to), d, d);
        return;
    }
    const uint32_t value = widened(a, from);
    const Type value_type = is_half(from) ? Type::f32 : from;
    if (!is_float(to)) {
        if (integral.empty()) bad("needs an integer rounding");
        emit(("cvt." + to_name + "." + std::string(name_of(value_type))).c_str(), d, value, 0, 0,
             static_cast<uint64_t>(rounding) | (flushes ? 0x100 : 0));
        return;
    }
    uint32_t result = value;
    if (!integral.empty()) {
        result = allocate(value_type == Type::f64);
        emit(handler("integral", value_type), result, value, 0, 0,
             static_cast<uint64_t>(rounding) | (flushes ? 0x100 : 0));
    }
    if (saturates) {
        const uint32_t clamped = allocate(value_type == Type::f64);
        if (flushes && value_type == Type::f32) {
            emit("cvt.f32.f32.ftz", clamped, result);
            emit("saturate.f32", clamped, clamped);
        } else {
            emit(handler("saturate", value_type), clamped, result);
        }
        result = clamped;
    }
    if (is_half(to) || to == Type::tf32) {
        const bool nearest = rounding == Rounding::rn && !finite && !relu;
        if (flushes && value_type == Type::f32) {
            const uint32_t flushed = allocate(false);
            emit("cvt.f32.f32.ftz", flushed, result);
            result = flushed;
        }
        if (nearest && value_type == Type::f32 && to != Type::tf32)
            emit(("cvt." + to_name + ".f32").c_str(), d, result);
        else
            emit(("narrow." + to_name + "." + std::string(name_of(value_type))).c_str(), d, result,
                 0, 0, how);
        return;
    }
    // Between f32 and f64; f64 has no .ftz of its own.
    const bool shortens = to == Type::f32 && value_type == Type::f64;
    if (relu) unknown();
    if (shortens && rounding != Rounding::rn && integral.empty()) set_rounding(rounding);
    emit(("cvt." + to_name + "." + std::string(name_of(value_type)) +
          (to == Type::f64 && value_type == Type::f64 ? "" : ftz))
             .c_str(),
         d, result);
    if (shortens && rounding != Rounding::rn && integral.empty()) set_rounding(Rounding::rn);
}

uint32_t Decoder::comparison(Modifiers& modifiers, Type type, std::string_view test) {
    const bool flushes = modifiers.take("ftz");
    const uint32_t result = allocate_predicate();
    uint32_t a = source(1, type), b = source(2, type);
    std::string name = "setp." + std::string(test);
    Type compared = type;
    if (is_half(type)) {
        a = widened(a, type);
        b = widened(b, type);
        compared = Type::f32;
        if (flushes) unknown();  // f16's own subnormals are f32's normal numbers
    }
    emit(handler(name, compared, flushes && compared == Type::f32 ? ".ftz" : ""), result, a, b);
    return result;
}

void Decoder::compare_pair(Type type, std::string_view test, uint32_t* results) {
    const uint32_t a = source(1, type), b = source(2, type);
    for (unsigned i = 0; i < 2; ++i) {
        const uint32_t x = allocate(false), y = allocate(false);
        emit(i ? "high.b32" : "low.b32", x, a);
        emit(i ? "high.b32" : "low.b32", y, b);
        results[i] = allocate_predicate();
        const uint32_t wide_x = widened(x, half_of(type)), wide_y = widened(y, half_of(type));
        emit(handler("setp." + std::string(test), Type::f32), results[i], wide_x, wide_y);
    }
}

// The test's result joined with a third operand; `how` is what the operation "combine" takes.
uint32_t Decoder::combined(uint32_t test, uint32_t third, uint64_t how) {
    if (how == 0) return test;
    const uint32_t result = allocate_predicate();
    emit("combine", result, test, third, allocate_predicate(), how);
    return result;
}

void Decoder::compare(bool set) {
    Modifiers modifiers(*statement_);
    std::string_view test =
        modifiers.take_any({"eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ",
                            "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
    if (test.empty()) bad("compares nothing");
    if (test == "lo") test = "lt";
    if (test == "ls") test = "le";
    if (test == "hi") test = "gt";
    if (test == "hs") test = "ge";
    const std::string_view joined = modifiers.take_any({"and", "or", "xor"});
    const uint64_t operation = joined == "and" ? 1 : joined == "or" ? 2 : joined == "xor" ? 3 : 0;
    const Type result_type = set ? modifiers.required_type() : Type::pred;
    const Type type = modifiers.required_type();
    need(operation ? 4 : 3);
    uint32_t third = always_;
    uint64_t how = operation;
    if (operation) {
        third = predicate(operand(3));
        if (operand(3).negated) how |= 0x100;
    }
    if (is_pair(type)) {
        // f16's subnormals are normal numbers of f32: flushing would need another comparison.
        modifiers.finish();
        uint32_t results[2];
        compare_pair(type, test, results);
        for (uint32_t& result : results) result = combined(result, third, how);
        const Operand& d = operand(0);
        if (!set) {
            if (d.kind != Kind::list) bad("needs two predicates");
            for (unsigned i = 0; i < 2; ++i)
                emit("or.pred", target_predicate(d.items[i]), results[i], results[i]);
            return;
        }
        if (!is_pair(result_type) && size_of(result_type) != 4) unknown();
        const uint64_t truth = result_type == Type::f16x2    ? 0x3c00
                               : result_type == Type::bf16x2 ? 0x3f80
                                                             : 0xffff;
        uint32_t parts[2];
        for (unsigned i = 0; i < 2; ++i) {
            parts[i] = allocate(false);
            emit("selp.b32", parts[i], constant(truth, false), constant(0, false), results[i]);
        }
        emit("pack.b32", target(d, result_type), parts[0], parts[1]);
        return;
    }
    const uint32_t result = comparison(modifiers, type, test);
    modifiers.finish();
    if (set) {
        const uint32_t chosen = combined(result, third, how);
        const uint64_t truth = result_type == Type::f32    ? 0x3f80'0000
                               : result_type == Type::f16  ? 0x3c00
                               : result_type == Type::bf16 ? 0x3f80
                                                           : 0xffff'ffff;
        if (size_of(result_type) > 4) unknown();
        emit("selp.b32", target(0, result_type), constant(truth, false), constant(0, false),
             chosen);
        return;
    }
    const Operand& d = operand(0);
    if (d.kind == Kind::list) {
        const uint32_t p = target_predicate(d.items[0]), q = target_predicate(d.items[1]);
        emit("combine", p, result, third, q, how);
    } else if (operation) {
        emit("combine", target_predicate(d), result, third, allocate_predicate(), how);
    } else {
        program_->ops.back().d = target_predicate(d);  // straight into the register
    }
}

void Decoder::select() {
    need(4);
    Modifiers modifiers(*statement_);
    const Type type = modifiers.required_type();
    modifiers.finish();
    const uint32_t a = source(1, type), b = source(2, type), c = predicate(operand(3));
    emit(size_of(type) == 8 ? "selp.b64" : "selp.b32", target(0, type), a, b, c,
         operand(3).negated ? kAllLanes : 0);
}

void Decoder::select_by_sign() {
    need(4);
    Modifiers modifiers(*statement_);
    const bool flushes = modifiers.take("ftz");
    const Type type = modifiers.required_type(), tested = modifiers.required_type();
    modifiers.finish();
    const uint32_t a = source(1, type), b = source(2, type), c = source(3, tested);
    const uint32_t chosen = allocate_predicate();
    emit(handler("setp.ge", tested, flushes && tested == Type::f32 ? ".ftz" : ""), chosen, c,
         constant(0, false));
    emit(size_of(type) == 8 ? "selp.b64" : "selp.b32", target(0, type), a, b, chosen);
}

}  // namespace phos::ptx
