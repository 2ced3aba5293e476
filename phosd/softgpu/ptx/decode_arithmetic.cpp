// Integer, real and half arithmetic, logic and bit fields.
#include <algorithm>
#include <iterator>

#include "decode.h"

namespace phos::ptx {
namespace {

template <size_t N>
bool one_of(std::string_view name, const std::string_view (&names)[N]) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

constexpr std::string_view kUnary[] = {"abs",   "neg", "not", "cnot", "sqrt", "rcp",
                                       "rsqrt", "sin", "cos", "lg2",  "ex2",  "tanh"};
constexpr std::string_view kBinary[] = {"add", "sub", "mul", "div", "rem",  "min",
                                        "max", "and", "or",  "xor", "mul24"};
constexpr std::string_view kTernary[] = {"mad", "fma", "sad", "mad24"};

}  // namespace

bool Decoder::arithmetic() {
    const std::string_view name = statement_->opcode;
    const unsigned operands = one_of(name, kUnary)     ? 1
                              : one_of(name, kBinary)  ? 2
                              : one_of(name, kTernary) ? 3
                                                       : 0;
    if (operands == 0) {
        if (name == "addc" || name == "subc" || name == "madc") {
            Modifiers modifiers(*statement_);
            carry_operation(std::string(name), modifiers);
            return true;
        }
        if (name == "dp4a" || name == "dp2a") {
            dot_product(std::string(name));
            return true;
        }
        return bit_operation(name);
    }
    need(operands + 1);
    Modifiers modifiers(*statement_);
    const Type type = modifiers.required_type();
    if (type == Type::pred) {
        // not, and, or and xor on whole masks; xor with "always" negates.
        modifiers.finish();
        const uint32_t d = target_predicate(operand(0));
        const uint32_t a = predicate(operand(1));
        const uint64_t negations = (operand(1).negated ? 1 : 0);
        if (name == "not") {
            emit("xor.pred", d, a, always_, 0, negations);
        } else if (name == "and" || name == "or" || name == "xor") {
            const uint32_t b = predicate(operand(2));
            emit(handler(std::string(name), type), d, a, b, 0,
                 negations | (operand(2).negated ? 2 : 0));
        } else {
            unknown();
        }
        return true;
    }
    if (is_float(type)) {
        real_operation(std::string(name), operands, modifiers, type);
        return true;
    }
    if (std::find(statement_->modifiers.begin(), statement_->modifiers.end(), "cc") !=
        statement_->modifiers.end()) {
        Modifiers all(*statement_);
        carry_operation(std::string(name), all);
        return true;
    }
    integer_operation(std::string(name), operands, modifiers);
    return true;
}

void Decoder::integer_operation(const std::string& name, unsigned operands, Modifiers& modifiers) {
    Modifiers copy(*statement_);
    const Type type = copy.required_type();
    std::string base = name;
    const std::string_view half = modifiers.take_any({"lo", "hi", "wide"});
    if (!half.empty()) base += "." + std::string(half);
    if (modifiers.take("sat")) base += ".sat";
    if (modifiers.take("relu")) base += ".relu";
    modifiers.finish();
    const bool wide = half == "wide";
    const Type result = !wide                ? type
                        : size_of(type) == 2 ? (is_signed(type) ? Type::s32 : Type::u32)
                                             : (is_signed(type) ? Type::s64 : Type::u64);
    const uint32_t a = source(1, type);
    const uint32_t b = operands > 1 ? source(2, type) : 0;
    const uint32_t c = operands > 2 ? source(3, result) : 0;
    emit(handler(base, type), target(0, result), a, b, c);
}

void Decoder::carry_operation(const std::string& name, Modifiers& modifiers) {
    const bool mad = name == "mad" || name == "madc";
    need(mad ? 4 : 3);
    const Type type = modifiers.required_type();
    std::string base = name;
    if (mad) base += "." + std::string(modifiers.take_any({"lo", "hi"}));
    if (modifiers.take("cc")) base += ".cc";
    modifiers.finish();
    const uint32_t a = source(1, type), b = source(2, type), c = mad ? source(3, type) : 0;
    emit(handler(base, type), target(0, type), a, b, c, carry_);
}

void Decoder::real_operation(const std::string& name, unsigned operands, Modifiers& modifiers,
                             Type type) {
    const bool half =
        type == Type::f16 || type == Type::f16x2 || type == Type::bf16 || type == Type::bf16x2;
    const Rounding rounding = modifiers.rounding();
    const std::string_view quality = modifiers.take_any({"approx", "full"});
    const bool flushes = modifiers.take("ftz");
    std::string base = name == "mad" ? "fma" : name, suffix;
    if (modifiers.take("NaN")) base += ".NaN";
    if (modifiers.take("xorsign")) {
        if (!modifiers.take("abs")) unknown();
        base += ".xorsign.abs";
    }
    if (name == "div" && quality == "approx") base = "div.approx";
    if (quality == "approx" && type == Type::f64) {
        base += ".approx";  // always with .ftz
    } else if (flushes) {
        suffix += ".ftz";
    }
    if (modifiers.take("sat")) suffix += ".sat";
    if (modifiers.take("relu")) suffix += ".relu";
    modifiers.finish();
    // The approximate functions of halves go through f32, which is closer than they promise.
    if (half && (name == "ex2" || name == "tanh")) {
        const bool pair = type == Type::f16x2 || type == Type::bf16x2;
        const std::string kind = type == Type::f16 || type == Type::f16x2 ? "f16" : "bf16";
        const uint32_t a = source(1, type), d = target(0, type);
        uint32_t results[2] = {0, 0};
        for (unsigned i = 0; i < (pair ? 2u : 1u); ++i) {
            const uint32_t part = allocate(false), wide = allocate(false);
            emit(i == 0 ? "low.b32" : "high.b32", part, a);
            emit(("cvt.f32." + kind).c_str(), wide, part);
            emit(handler(name, Type::f32, suffix), wide, wide);
            results[i] = allocate(false);
            emit(("cvt." + kind + ".f32").c_str(), results[i], wide);
        }
        if (pair)
            emit("pack.b32", d, results[0], results[1]);
        else
            emit("mov.b32", d, results[0]);
        return;
    }
    uint32_t slots[3] = {0, 0, 0};
    for (unsigned i = 0; i < operands; ++i) slots[i] = source(i + 1, type);
    const bool directed =
        rounding == Rounding::rz || rounding == Rounding::rm || rounding == Rounding::rp;
    if (directed && half) unknown();
    if (directed) set_rounding(rounding);
    emit(handler(base, type, suffix), target(0, type), slots[0], slots[1], slots[2]);
    if (directed) set_rounding(Rounding::rn);
}

void Decoder::dot_product(const std::string& name) {
    need(4);
    Modifiers modifiers(*statement_);
    std::string base = name;
    if (name == "dp2a") base += "." + std::string(modifiers.take_any({"lo", "hi"}));
    const Type a_type = modifiers.required_type(), b_type = modifiers.required_type();
    modifiers.finish();
    base += "." + std::string(name_of(a_type)) + "." + std::string(name_of(b_type));
    const uint32_t a = source(1, a_type), b = source(2, b_type), c = source(3, Type::u32);
    emit(base.c_str(), target(0, Type::u32), a, b, c);
}

bool Decoder::bit_operation(std::string_view name) {
    Modifiers modifiers(*statement_);
    std::string base(name);
    if (name == "shl" || name == "shr") {
        need(3);
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, Type::u32);
        emit(handler(base, type), target(0, type), a, b);
    } else if (name == "shf") {
        need(4);
        base += "." + std::string(modifiers.take_any({"l", "r"}));
        base += "." + std::string(modifiers.take_any({"wrap", "clamp"}));
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, type), c = source(3, Type::u32);
        emit(handler(base, type), target(0, type), a, b, c);
    } else if (name == "popc" || name == "clz" || name == "bfind") {
        need(2);
        if (modifiers.take("shiftamt")) base += ".shiftamt";
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type);
        emit(handler(base, type), target(0, Type::u32), a);
    } else if (name == "brev") {
        need(2);
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type);
        emit(handler(base, type), target(0, type), a);
    } else if (name == "bfe") {
        need(4);
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, Type::u32), c = source(3, Type::u32);
        emit(handler(base, type), target(0, type), a, b, c);
    } else if (name == "bfi") {
        need(5);
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, type);
        const uint32_t position = source(3, Type::u32), length = source(4, Type::u32);
        emit(handler(base, type), target(0, type), a, b, position, length);
    } else if (name == "bmsk" || name == "szext") {
        need(3);
        base += "." + std::string(modifiers.take_any({"wrap", "clamp"}));
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, Type::u32);
        emit(handler(base, type), target(0, type), a, b);
    } else if (name == "fns") {
        need(4);
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, type), c = source(3, type);
        emit(handler(base, type), target(0, type), a, b, c);
    } else if (name == "lop3") {
        need(5);
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, type), c = source(3, type);
        emit(handler(base, type), target(0, type), a, b, c, integer(operand(4)));
    } else if (name == "prmt") {
        need(4);
        const Type type = modifiers.required_type();
        const std::string_view mode =
            modifiers.take_any({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
        if (!mode.empty()) base += "." + std::string(mode);
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, type), c = source(3, Type::u32);
        emit(handler(base, type), target(0, type), a, b, c);
    } else if (name == "copysign") {
        need(3);
        const Type type = modifiers.required_type();
        modifiers.finish();
        const uint32_t a = source(1, type), b = source(2, type);
        emit(handler(base, type), target(0, type), a, b);
    } else {
        return false;
    }
    return true;
}

}  // namespace phos::ptx
