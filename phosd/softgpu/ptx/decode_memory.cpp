// Loads, stores, atomics and addresses.
#include "decode.h"

namespace phos::ptx {
namespace {

unsigned vector_length(std::string_view name) {
    return name == "v2" ? 2 : name == "v4" ? 4 : name == "v8" ? 8 : 1;
}

}  // namespace

bool Decoder::memory() {
    const std::string_view name = statement_->opcode;
    if (name == "ld" || name == "ldu") {
        load();
    } else if (name == "st") {
        store();
    } else if (name == "atom" || name == "red") {
        atomic(name == "red");
    } else if (name == "cvta") {
        address_conversion();
    } else if (name == "isspacep") {
        need(2);
        Modifiers modifiers(*statement_);
        modifiers.take("shared::cta");
        const std::string_view which =
            modifiers.take_any({"global", "shared", "local", "const", "param"});
        modifiers.finish();
        const uint64_t window = which == "global" || which == "const" ? 0
                                : which == "local"                    ? kLocalWindow
                                : which == "param"                    ? kParamWindow
                                                                      : kSharedWindow;
        const uint32_t a = source(1, Type::u64);
        const uint32_t d = target_predicate(operand(0));
        emit("is_space", d, a, 0, 0, window);
    } else if (name == "membar" || name == "fence") {
        Modifiers modifiers(*statement_);
        modifiers.take_any({"gl", "cta", "sys", "cluster", "gpu"});
        modifiers.take_any({"sc", "acq_rel", "acquire", "release"});
        modifiers.take_any({"gl", "cta", "sys", "cluster", "gpu"});
        modifiers.take_prefixed("proxy");
        modifiers.take_any({"alias", "async", "async::global", "async::shared::cta"});
        modifiers.finish();
        emit("fence", 0);
    } else if (name == "prefetch" || name == "prefetchu" || name == "applypriority" ||
               name == "discard") {
        // Hints about caches; the address need not even be valid.
    } else if (name == "cp") {
        asynchronous_copy();
    } else {
        return false;
    }
    return true;
}

// Ordering, scopes and cache hints: every access here is already as strong as the strongest.
void Decoder::qualifiers(Modifiers& modifiers) {
    modifiers.take_any({"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"});
    modifiers.take_any({"cta", "cluster", "gpu", "sys"});
    modifiers.take_any({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
    modifiers.take("nc");
    modifiers.take_prefixed("L1::");
    modifiers.take_prefixed("L2::evict");
    modifiers.take_any({"L2::64B", "L2::128B", "L2::256B"});
    if (modifiers.take("L2::cache_hint") && statement_->operands.size() < 3)
        bad("needs a cache policy");
}

Space Decoder::space(Modifiers& modifiers) {
    const std::string_view name =
        modifiers.take_any({"global", "shared", "shared::cta", "local", "const", "param",
                            "param::entry", "param::func"});
    if (name.empty()) return Space::generic;
    if (name == "global") return Space::global;
    if (name == "local") return Space::local;
    if (name == "const") return Space::constant;
    if (name.substr(0, 6) == "shared") return Space::shared;
    return Space::param;
}

Access& Decoder::access(const Operand& address, Space space, Type type, unsigned count) {
    if (address.kind != Kind::address) bad("needs an address in brackets");
    Access access;
    access.space = space;
    access.element = size_of(type);
    access.count = count;
    access.offset = static_cast<int64_t>(address.bits);
    const bool in_kernel = scope_ == scopes_.data();
    if (space == Space::param && !in_kernel) access.space = Space::local;
    if (address.has_reg) {
        const Type held = scope_->function->registers[address.reg].type;
        if (held == Type::pred || size_of(held) < 4 || size_of(held) > 8)
            bad("an address in a register of the wrong type");
        access.based = true;
        access.wide_base = size_of(held) == 8;
        access.base = scope_->register_slots[address.reg];
    } else if (!address.name.empty()) {
        uint32_t offset = 0;
        const ast::Variable* variable = local_variable(address.name, offset);
        const bool of_function = variable != nullptr;
        if (!variable) variable = parameter(address.name, offset);
        if (variable) {
            if (address.bits + uint64_t{access.element} * count > variable->size &&
                variable->space != Space::shared)
                bad("reaches beyond " + std::string(address.name));
            access.offset += offset;
            // The kernel's parameters lie in the launch; every other one in a frame.
            if (variable->space == Space::shared) {
                access.space = Space::shared;
            } else if (of_function || !in_kernel) {
                access.space = Space::local;
                access.based = !in_kernel;
                access.base = special(Special::frame);
            } else {
                access.space = Space::param;
            }
        } else if (const auto shared = shared_offsets_.find(address.name);
                   shared != shared_offsets_.end()) {
            access.space = Space::shared;
            access.offset += shared->second;
        } else if (const auto found = module_.variable_index.find(address.name);
                   found != module_.variable_index.end()) {
            access.space = Space::global;
            access.offset += static_cast<int64_t>(addresses_[found->second]);
        } else {
            bad("the name " + std::string(address.name) + " is not declared");
        }
    }
    program_->accesses.push_back(access);
    return program_->accesses.back();
}

void Decoder::load() {
    Modifiers modifiers(*statement_);
    const Space where = space(modifiers);
    const unsigned count = vector_length(modifiers.take_any({"v2", "v4", "v8"}));
    Type type = modifiers.required_type();
    qualifiers(modifiers);
    modifiers.finish();
    need(2, 3);  // the third is a cache policy
    const Operand& to = operand(0);
    const bool whole = type == Type::b128;
    if (whole) type = Type::b64;
    Access& from = access(operand(1), where, type, whole ? 2 : count);
    if (whole) {
        if (count != 1) unknown();
        if (to.kind != Kind::reg || scope_->function->registers[to.reg].type != Type::b128)
            bad("needs a register of 128 bits");
        from.slots[0] = scope_->register_slots[to.reg];
        from.slots[1] = from.slots[0] + kLanes * 8;
    } else if (to.kind == Kind::vector) {
        if (to.items.size() != count) bad("a vector of the wrong length");
        for (unsigned i = 0; i < count; ++i) from.slots[i] = target(to.items[i], type);
    } else {
        if (count != 1) bad("needs a vector to write");
        from.slots[0] = target(to, type);
    }
    const bool fixed = from.space == Space::param && !from.based;
    if (from.space == Space::param && from.offset < 0) bad("an offset below the parameters");
    const Type memory_type = type == Type::b8 ? Type::u8
                             : type == Type::b16 || type == Type::f16 || type == Type::bf16
                                 ? Type::u16
                             : size_of(type) == 4 ? Type::b32
                             : size_of(type) == 8 ? Type::b64
                                                  : type;
    emit(handler(fixed ? "ldparam" : "ld", memory_type), 0).access = &from;
}

void Decoder::store() {
    Modifiers modifiers(*statement_);
    const Space where = space(modifiers);
    const unsigned count = vector_length(modifiers.take_any({"v2", "v4", "v8"}));
    Type type = modifiers.required_type();
    qualifiers(modifiers);
    modifiers.finish();
    need(2, 3);
    const bool whole = type == Type::b128;
    if (whole) type = Type::b64;
    Access& to = access(operand(0), where, type, whole ? 2 : count);
    if (to.space == Space::param) bad("writes a kernel's parameter");
    const Operand& from = operand(1);
    if (whole) {
        if (count != 1) unknown();
        if (from.kind != Kind::reg || scope_->function->registers[from.reg].type != Type::b128)
            bad("needs a register of 128 bits");
        to.slots[0] = scope_->register_slots[from.reg];
        to.slots[1] = to.slots[0] + kLanes * 8;
    } else if (from.kind == Kind::vector) {
        if (from.items.size() != count) bad("a vector of the wrong length");
        for (unsigned i = 0; i < count; ++i) to.slots[i] = source(from.items[i], type);
    } else {
        if (count != 1) bad("needs a vector to store");
        to.slots[0] = source(from, type);
    }
    emit(("st.b" + std::to_string(8 * size_of(type))).c_str(), 0).access = &to;
}

void Decoder::atomic(bool reduction) {
    Modifiers modifiers(*statement_);
    const Space where = space(modifiers);
    const std::string_view operation =
        modifiers.take_any({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
    if (operation.empty()) unknown();
    const unsigned count = vector_length(modifiers.take_any({"v2", "v4", "v8"}));
    Type type = modifiers.required_type();
    modifiers.take("noftz");
    qualifiers(modifiers);
    modifiers.finish();
    const size_t first = reduction ? 0 : 1;
    const bool swaps = operation == "cas";
    need(first + (swaps ? 3 : 2), first + (swaps ? 4 : 3));
    if (count > 1) {
        const Operand& values = operand(first + 1);
        if (!reduction || operation != "add" || type != Type::f32) unknown();
        if (values.kind != Kind::vector || values.items.size() != count)
            bad("a vector of the wrong length");
        Access& at = access(operand(first), where, type, count);
        for (unsigned i = 0; i < count; ++i) at.slots[i] = source(values.items[i], type);
        emit("red.add.vector.f32", 0).access = &at;
        return;
    }
    if (is_float(type) && operation != "add") {
        if (operation != "exch") unknown();
        type = size_of(type) == 8 ? Type::b64 : Type::b32;
    }
    const Access& at = access(operand(first), where, type, 1);
    if (at.space != Space::global && at.space != Space::shared && at.space != Space::generic)
        bad("works on global and shared memory alone");
    const uint32_t b = source(first + 1, type), c = swaps ? source(first + 2, type) : 0;
    const uint32_t d = reduction ? allocate(size_of(type) == 8) : target(0, type);
    emit(handler("atom." + std::string(operation), type), d, 0, b, c).access = &at;
}

void Decoder::address_conversion() {
    need(2);
    Modifiers modifiers(*statement_);
    const bool from_generic = modifiers.take("to");
    const Space where = space(modifiers);
    const Type type = modifiers.required_type();
    modifiers.finish();
    if (size_of(type) != 8) unsupported(statement_->line, "a generic address of 32 bits");
    const uint64_t window = where == Space::shared  ? kSharedWindow
                            : where == Space::local ? kLocalWindow
                            : where == Space::param ? kParamWindow
                                                    : 0;
    const uint32_t a = source(1, type);
    const uint32_t d = target(0, type);
    if (window == 0)
        emit("mov.b64", d, a);
    else
        emit(from_generic ? "from_generic" : "to_generic", d, a, 0, 0, window);
}

void Decoder::asynchronous_copy() {
    Modifiers modifiers(*statement_);
    if (!modifiers.take("async")) unknown();
    if (modifiers.take_any({"commit_group", "wait_group", "wait_all"}) != "") {
        modifiers.finish();
        return;  // the copies are done already
    }
    modifiers.take_any({"ca", "cg"});
    if (modifiers.take_any({"shared", "shared::cta"}).empty() || !modifiers.take("global"))
        unknown();
    modifiers.take_prefixed("L2::");
    modifiers.finish();
    need(3, 4);
    const uint64_t bytes = integer(operand(2));
    if (bytes != 4 && bytes != 8 && bytes != 16) bad("copies 4, 8 or 16 bytes");
    const bool sized = statement_->operands.size() == 4 &&
                       (operand(3).kind == Kind::integer ||
                        (operand(3).kind == Kind::reg &&
                         size_of(scope_->function->registers[operand(3).reg].type) == 4));
    Access& to = access(operand(0), Space::shared, Type::b8, 1);
    to.element = static_cast<unsigned>(bytes);
    const Operand& address = operand(1);
    if (address.kind != Kind::address) bad("needs an address in brackets");
    uint32_t from;
    if (address.has_reg) {
        if (size_of(scope_->function->registers[address.reg].type) != 8)
            bad("needs a 64-bit address");
        from = allocate(true);
        emit("add.b64", from, scope_->register_slots[address.reg], constant(address.bits, true));
    } else {
        from = symbol(address, Type::u64);
    }
    const uint32_t size = sized ? source(3, Type::u32) : constant(bytes, false);
    emit("copy", 0, from, size).access = &to;
}

}  // namespace phos::ptx
