// The decoder's operands: registers, constants, special registers and addresses become slots.
#include <cstring>

#include "decode.h"

namespace phos::ptx {
namespace {

struct SpecialName {
    std::string_view name;
    Special special;
};

constexpr SpecialName kSpecials[] = {
    {"%tid.x", Special::tid_x},
    {"%tid.y", Special::tid_y},
    {"%tid.z", Special::tid_z},
    {"%ntid.x", Special::ntid_x},
    {"%ntid.y", Special::ntid_y},
    {"%ntid.z", Special::ntid_z},
    {"%ctaid.x", Special::ctaid_x},
    {"%ctaid.y", Special::ctaid_y},
    {"%ctaid.z", Special::ctaid_z},
    {"%nctaid.x", Special::nctaid_x},
    {"%nctaid.y", Special::nctaid_y},
    {"%nctaid.z", Special::nctaid_z},
    {"%clusterid.x", Special::clusterid_x},
    {"%clusterid.y", Special::clusterid_y},
    {"%clusterid.z", Special::clusterid_z},
    {"%nclusterid.x", Special::nclusterid_x},
    {"%nclusterid.y", Special::nclusterid_y},
    {"%nclusterid.z", Special::nclusterid_z},
    {"%cluster_ctaid.x", Special::cluster_ctaid_x},
    {"%cluster_ctaid.y", Special::cluster_ctaid_y},
    {"%cluster_ctaid.z", Special::cluster_ctaid_z},
    {"%cluster_nctaid.x", Special::cluster_nctaid_x},
    {"%cluster_nctaid.y", Special::cluster_nctaid_y},
    {"%cluster_nctaid.z", Special::cluster_nctaid_z},
    {"%cluster_ctarank", Special::cluster_ctarank},
    {"%cluster_nctarank", Special::cluster_nctarank},
    {"%laneid", Special::laneid},
    {"%warpid", Special::warpid},
    {"%nwarpid", Special::nwarpid},
    {"%smid", Special::smid},
    {"%nsmid", Special::nsmid},
    {"%gridid", Special::gridid},
    {"%lanemask_eq", Special::lanemask_eq},
    {"%lanemask_le", Special::lanemask_le},
    {"%lanemask_lt", Special::lanemask_lt},
    {"%lanemask_ge", Special::lanemask_ge},
    {"%lanemask_gt", Special::lanemask_gt},
    {"%dynamic_smem_size", Special::dynamic_smem_size},
    {"%total_smem_size", Special::total_smem_size},
};

bool wide_type(Type type) {
    return size_of(type) >= 8;
}

}  // namespace

std::string Decoder::spelled() const {
    std::string text(statement_->opcode);
    for (const std::string_view modifier : statement_->modifiers)
        text += "." + std::string(modifier);
    return text;
}

void Decoder::bad(const std::string& what) const {
    invalid(statement_->line, spelled() + ": " + what);
}
void Decoder::unknown() const {
    unsupported(statement_->line, "the instruction " + spelled());
}

void Decoder::need(size_t least, size_t most) const {
    const size_t count = statement_->operands.size();
    if (count < least || count > (most ? most : least))
        bad("takes " + std::to_string(least) + " operands, not " + std::to_string(count));
}

uint32_t Decoder::allocate(bool wide) {
    constexpr uint32_t kMostBytes = 1u << 28;
    const uint32_t at = program_->register_bytes;
    if (at >= kMostBytes)
        throw LoadError{CUDA_ERROR_OUT_OF_MEMORY,
                        "a kernel and its functions have too many registers"};
    program_->register_bytes += kLanes * (wide ? 8 : 4);
    return at;
}

uint32_t Decoder::allocate_predicate() {
    if (predicates_free_ == 0) {
        predicate_next_ = allocate(false);
        predicates_free_ = kLanes;
    }
    --predicates_free_;
    predicate_next_ += 4;
    return predicate_next_ - 4;
}

uint32_t Decoder::constant(uint64_t bits, bool wide) {
    if (!wide) bits &= 0xffff'ffff;
    const auto [at, fresh] = constants_.try_emplace({bits, wide}, 0);
    if (fresh) at->second = allocate(wide);
    return at->second;
}

uint32_t Decoder::special(Special which) {
    const auto [at, fresh] = specials_.try_emplace(which, 0);
    if (fresh) at->second = allocate(false);
    return at->second;
}

uint64_t Decoder::integer(const Operand& operand) const {
    if (operand.kind != Kind::integer) bad("needs an integer constant");
    return operand.bits;
}

uint32_t Decoder::immediate(const Operand& operand, Type type) {
    uint64_t bits = operand.bits;
    if (operand.kind == Kind::integer) {
        if (type == Type::f32 || type == Type::f64) bad("takes no integer constant");
    } else if (operand.kind == Kind::real32 && size_of(type) == 8) {
        float narrow;
        const auto low = static_cast<uint32_t>(bits);
        std::memcpy(&narrow, &low, sizeof narrow);
        const double wide = narrow;
        std::memcpy(&bits, &wide, sizeof bits);
    } else if (operand.kind == Kind::real64 && size_of(type) == 4) {
        double wide;
        std::memcpy(&wide, &bits, sizeof wide);
        const auto narrow = static_cast<float>(wide);
        uint32_t low;
        std::memcpy(&low, &narrow, sizeof low);
        bits = low;
    } else if (size_of(type) < 4) {
        bad("takes no real constant");
    }
    return constant(bits, wide_type(type));
}

const ast::Variable* Decoder::local_variable(std::string_view name, uint32_t& offset) const {
    const ast::Function& function = *scope_->function;
    for (uint32_t at = statement_->scope;; at = function.scopes[at].parent) {
        const auto found = function.scopes[at].variables.find(name);
        if (found != function.scopes[at].variables.end()) {
            offset = scope_->variable_offsets[found->second];
            return &function.variables[found->second];
        }
        if (at == 0) return nullptr;
    }
}

const ast::Variable* Decoder::parameter(std::string_view name, uint32_t& offset) const {
    const auto found = scope_->parameter_offsets.find(name);
    if (found == scope_->parameter_offsets.end()) return nullptr;
    offset = found->second;
    for (const ast::Variable& each : scope_->function->parameters)
        if (each.name == name) return &each;
    for (const ast::Variable& each : scope_->function->returns)
        if (each.name == name) return &each;
    return nullptr;
}

uint32_t Decoder::frame_address(uint32_t offset, bool wide) {
    if (scope_ == scopes_.data()) return constant(offset, wide);  // the kernel's frame begins at 0
    const uint32_t narrow = allocate(false);
    emit("add.b32", narrow, special(Special::frame), constant(offset, false));
    if (!wide) return narrow;
    const uint32_t result = allocate(true);
    emit("cvt.u64.u32", result, narrow);
    return result;
}

uint32_t Decoder::symbol(const Operand& operand, Type type) {
    const bool wide = wide_type(type);
    const std::string_view name = operand.name;
    for (const SpecialName& each : kSpecials) {
        if (each.name != name) continue;
        if (!wide) return special(each.special);
        const uint32_t result = allocate(true);
        emit("cvt.u64.u32", result, special(each.special));
        return result;
    }
    if (name == "WARP_SZ") return constant(kLanes, wide);
    const bool clock = name == "%clock" || name == "%clock64" || name == "%clock_hi";
    if (clock || name.substr(0, 12) == "%globaltimer") {
        const uint32_t full = allocate(true);
        emit("clock.b64", full, 0, 0, 0, clock ? 0 : 1);
        if (wide) return full;
        const uint32_t result = allocate(false);
        emit(name == "%clock_hi" || name == "%globaltimer_hi" ? "high.b64" : "cvt.u32.u64", result,
             full);
        return result;
    }
    if (name[0] == '%') unsupported(statement_->line, "the register " + std::string(name));
    uint32_t offset = 0;
    if (const ast::Variable* variable = local_variable(name, offset)) {
        const auto at = static_cast<uint32_t>(offset + operand.bits);
        return variable->space == Space::shared ? constant(at, wide) : frame_address(at, wide);
    }
    if (parameter(name, offset)) {
        const auto at = static_cast<uint32_t>(offset + operand.bits);
        return scope_ == scopes_.data() ? constant(at, wide) : frame_address(at, wide);
    }
    if (const auto found = shared_offsets_.find(name); found != shared_offsets_.end())
        return constant(found->second + operand.bits, wide);
    if (const auto found = module_.variable_index.find(name); found != module_.variable_index.end())
        return constant(addresses_[found->second] + operand.bits, wide);
    if (const auto found = module_.function_index.find(name); found != module_.function_index.end())
        return constant(kFunctionWindow | found->second, wide);
    bad("the name " + std::string(name) + " is not declared");
}

uint32_t Decoder::source(const Operand& operand, Type type) {
    switch (operand.kind) {
        case Kind::integer:
        case Kind::real32:
        case Kind::real64:
            return immediate(operand, type);
        case Kind::symbol:
            return symbol(operand, type);
        case Kind::reg:
            break;
        default:
            bad("an operand of the wrong kind");
    }
    const Type held = scope_->function->registers[operand.reg].type;
    const uint32_t slot = scope_->register_slots[operand.reg];
    if (held == Type::pred) bad("a predicate where a value belongs");
    if (operand.negated) bad("only predicates can be negated");
    if (size_of(held) < size_of(type)) bad("a register narrower than the type");
    if (wide_type(held) == wide_type(type)) return slot;
    const uint32_t narrow = allocate(false);
    emit("cvt.u32.u64", narrow, slot);
    return narrow;
}

uint32_t Decoder::predicate(const Operand& operand) {
    if (operand.kind == Kind::integer) {
        // A constant predicate: `vote` and `bar.red` take one.
        const uint32_t slot = allocate_predicate();
        const uint64_t negate_both = 3;
        if (operand.bits != 0)
            emit("or.pred", slot, always_, always_);
        else
            emit("and.pred", slot, always_, always_, 0, negate_both);
        return slot;
    }
    if (operand.kind != Kind::reg || scope_->function->registers[operand.reg].type != Type::pred)
        bad("needs a predicate");
    return scope_->register_slots[operand.reg];
}

uint32_t Decoder::target_predicate(const Operand& operand) {
    if (operand.kind == Kind::sink) return allocate_predicate();
    if (operand.kind != Kind::reg || operand.negated) bad("needs a predicate to write");
    return predicate(operand);
}

uint32_t Decoder::target(const Operand& operand, Type type) {
    if (operand.kind == Kind::sink) return allocate(wide_type(type));
    if (operand.kind != Kind::reg) bad("needs a register to write");
    const Type held = scope_->function->registers[operand.reg].type;
    const uint32_t slot = scope_->register_slots[operand.reg];
    if (held == Type::pred) bad("a predicate where a value belongs");
    if (size_of(held) < size_of(type)) bad("a register narrower than the type");
    if (wide_type(held) == wide_type(type)) return slot;
    const uint32_t narrow = allocate(false);
    widenings_.push_back({slot, narrow, is_signed(type)});
    return narrow;
}

void Decoder::flush_targets() {
    for (const Widening& each : widenings_)
        emit(each.is_signed ? "cvt.s64.s32" : "cvt.u64.u32", each.to, each.from);
    widenings_.clear();
}

Handler Decoder::handler(const std::string& base, Type type, const std::string& suffix) const {
    if (Handler found = find_handler(base + "." + std::string(name_of(type)) + suffix))
        return found;
    if (!is_float(type) && type != Type::pred)
        if (Handler found = find_handler(base + ".b" + std::to_string(8 * size_of(type)) + suffix))
            return found;
    unknown();
}

Op& Decoder::emit(Handler handler, uint32_t d, uint32_t a, uint32_t b, uint32_t c, uint64_t value) {
    Op op;
    op.run = handler;
    op.d = d;
    op.a = a;
    op.b = b;
    op.c = c;
    op.guard = guard_;
    op.flip = flip_;
    op.value = value;
    program_->ops.push_back(op);
    program_->lines.push_back(statement_->line);
    return program_->ops.back();
}

Op& Decoder::emit(const char* name, uint32_t d, uint32_t a, uint32_t b, uint32_t c,
                  uint64_t value) {
    const Handler found = find_handler(name);
    if (!found) unknown();
    return emit(found, d, a, b, c, value);
}

void Decoder::set_rounding(Rounding rounding) {
    emit("rounding", 0, 0, 0, 0, static_cast<uint64_t>(rounding));
}

}  // namespace phos::ptx
