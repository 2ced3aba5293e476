#include "decode.h"

#include <algorithm>
#include <functional>

namespace phos::ptx {
namespace {

constexpr uint32_t kStackBytes = 32 << 10;  // a lane's, where the depth of calls is not known
constexpr size_t kMostFrame = size_t{16} << 20;

size_t aligned(size_t at, size_t alignment) {
    return (at + alignment - 1) / alignment * alignment;
}

Builtin builtin_named(std::string_view name) {
    if (name == "vprintf") return Builtin::vprintf;
    if (name == "__assertfail") return Builtin::assertfail;
    return Builtin::none;
}

}  // namespace

Modifiers::Modifiers(const ast::Statement& statement)
    : statement_(statement), left_(statement.modifiers) {}

bool Modifiers::take(std::string_view name) {
    const auto found = std::find(left_.begin(), left_.end(), name);
    if (found == left_.end()) return false;
    left_.erase(found);
    return true;
}

std::string_view Modifiers::take_any(std::initializer_list<std::string_view> names) {
    for (const std::string_view name : names)
        if (take(name)) return name;
    return "";
}

Type Modifiers::type() {
    for (auto each = left_.begin(); each != left_.end(); ++each) {
        const Type type = type_named(*each);
        if (type == Type::none) continue;
        left_.erase(each);
        return type;
    }
    return Type::none;
}

Type Modifiers::required_type() {
    const Type found = type();
    if (found == Type::none)
        invalid(statement_.line,
                "the instruction " + std::string(statement_.opcode) + " has no type");
    return found;
}

Rounding Modifiers::rounding() {
    const std::string_view name = take_any({"rn", "rz", "rm", "rp", "rna"});
    return name == "rn"    ? Rounding::rn
           : name == "rz"  ? Rounding::rz
           : name == "rm"  ? Rounding::rm
           : name == "rp"  ? Rounding::rp
           : name == "rna" ? Rounding::rna
                           : Rounding::none;
}

void Modifiers::take_prefixed(std::string_view prefix) {
    left_.erase(std::remove_if(
                    left_.begin(), left_.end(),
                    [&](std::string_view name) { return name.substr(0, prefix.size()) == prefix; }),
                left_.end());
}

void Modifiers::finish() const {
    if (!left_.empty())
        unsupported(statement_.line, "the modifier ." + std::string(left_.front()) +
                                         " of the instruction " + std::string(statement_.opcode));
}

std::unique_ptr<KernelCode> Decoder::kernel(const ast::Function& entry) {
    auto result = std::make_unique<KernelCode>();
    program_ = &result->program;
    result->name = std::string(entry.name);
    result->max_threads = entry.max_threads;
    size_t offset = 0;
    for (const ast::Variable& parameter : entry.parameters) {
        offset = aligned(offset, parameter.align);
        result->parameters.push_back({offset, parameter.size});
        offset += parameter.size;
    }
    result->parameter_bytes = offset;

    always_ = allocate_predicate();
    program_->predicate_always = always_;
    carry_ = allocate_predicate();
    program_->frame_slot = special(Special::frame);
    find_reachable(entry);
    lay_out_shared();
    mark_recursion();
    for (size_t i = 0; i < reachable_.size(); ++i) lay_out_frame(i);
    for (size_t i = 0; i < reachable_.size(); ++i) function(i);

    // The deepest chain of calls bounds the local memory, unless functions call themselves.
    bool unbounded = calls_indirectly_;
    for (const FunctionCode& code : program_->functions) unbounded |= code.recursive;
    std::function<size_t(size_t)> depth = [&](size_t index) {
        size_t below = 0;
        for (const size_t callee : calls_[reachable_[index]])
            below = std::max(below, depth(program_index_.at(callee)));
        return program_->functions[index].frame_bytes + below;
    };
    result->local_bytes = unbounded ? program_->functions[0].frame_bytes + kStackBytes : depth(0);
    program_->local_bytes = aligned(result->local_bytes, 16);
    program_->register_bytes = static_cast<uint32_t>(aligned(program_->register_bytes, 64));
    program_->entry_block = program_->functions[0].entry_block;
    for (const auto& [which, slot] : specials_) program_->specials.emplace_back(which, slot);
    for (const auto& [key, slot] : constants_)
        program_->constants.push_back({slot, key.second, key.first});
    result->static_shared_bytes = program_->static_shared_bytes;
    result->registers = static_cast<unsigned>(std::min<size_t>(255, entry.registers.size()));
    return result;
}

void Decoder::reach(size_t function) {
    if (!program_index_.emplace(function, static_cast<uint32_t>(reachable_.size())).second) return;
    reachable_.push_back(function);
}

void Decoder::scan(const ast::Function& function, const Operand& operand, uint32_t scope) {
    for (const Operand& item : operand.items) scan(function, item, scope);
    if (operand.name.empty()) return;
    for (uint32_t at = scope;; at = function.scopes[at].parent) {
        if (function.scopes[at].variables.count(operand.name)) return;
        if (at == 0) break;
    }
    if (const auto found = module_.variable_index.find(operand.name);
        found != module_.variable_index.end()) {
        if (module_.variables[found->second].space == Space::shared &&
            shared_offsets_.emplace(operand.name, 0).second)
            shared_used_.push_back(operand.name);
        return;
    }
    if (const auto found = module_.function_index.find(operand.name);
        found != module_.function_index.end())
        reach(found->second);
}

void Decoder::find_reachable(const ast::Function& entry) {
    reach(module_.function_index.at(entry.name));
    for (size_t i = 0; i < reachable_.size(); ++i) {
        const size_t index = reachable_[i];
        const ast::Function& function = module_.functions[index];
        for (const ast::Statement& statement : function.statements) {
            for (const Operand& operand : statement.operands)
                scan(function, operand, statement.scope);
            if (statement.opcode != "call") continue;
            const Operand* callee = nullptr;
            for (const Operand& operand : statement.operands) {
                if (operand.kind == Kind::list) continue;
                callee = &operand;
                break;
            }
            if (callee == nullptr) continue;
            if (callee->kind == Kind::symbol) {
                const auto found = module_.function_index.find(callee->name);
                if (found != module_.function_index.end()) calls_[index].push_back(found->second);
            } else if (!calls_indirectly_) {
                calls_indirectly_ = true;
                for (const ast::Variable& variable : module_.variables)
                    for (const ast::Relocation& relocation : variable.relocations)
                        if (const auto found = module_.function_index.find(relocation.symbol);
                            found != module_.function_index.end())
                            reach(found->second);
            }
        }
    }
}

void Decoder::lay_out_shared() {
    size_t offset = 0;
    size_t dynamic_alignment = 1;
    const auto place = [&](const ast::Variable& variable, uint32_t& where) {
        offset = aligned(offset, variable.align);
        where = static_cast<uint32_t>(offset);
        offset += variable.size;
        if (offset > kMostFrame) invalid(variable.line, "more shared memory than a block can have");
    };
    for (const std::string_view name : shared_used_) {
        const ast::Variable& variable = module_.variables[module_.variable_index.at(name)];
        if (variable.external || variable.size == 0)
            dynamic_alignment = std::max(dynamic_alignment, variable.align);
        else
            place(variable, shared_offsets_[name]);
    }
    scopes_.resize(reachable_.size());
    for (size_t i = 0; i < reachable_.size(); ++i) {
        const ast::Function& function = module_.functions[reachable_[i]];
        scopes_[i].function = &function;
        scopes_[i].variable_offsets.resize(function.variables.size());
        for (size_t v = 0; v < function.variables.size(); ++v)
            if (function.variables[v].space == Space::shared)
                place(function.variables[v], scopes_[i].variable_offsets[v]);
    }
    offset = aligned(offset, dynamic_alignment);
    for (const std::string_view name : shared_used_) {
        const ast::Variable& variable = module_.variables[module_.variable_index.at(name)];
        if (variable.external || variable.size == 0)
            shared_offsets_[name] = static_cast<uint32_t>(offset);
    }
    program_->static_shared_bytes = offset;
}

void Decoder::mark_recursion() {
    program_->functions.resize(reachable_.size());
    program_->function_of_address.assign(module_.functions.size(), -1);
    for (size_t i = 0; i < reachable_.size(); ++i) {
        const size_t start = reachable_[i];
        program_->function_of_address[start] = static_cast<int32_t>(i);
        std::vector<size_t> pending = calls_[start];
        std::map<size_t, bool> seen;
        while (!pending.empty()) {
            const size_t at = pending.back();
            pending.pop_back();
            if (at == start) program_->functions[i].recursive = true;
            if (seen[at]) continue;
            seen[at] = true;
            pending.insert(pending.end(), calls_[at].begin(), calls_[at].end());
        }
        // Whoever is called through a pointer may be anyone's callee.
        if (calls_indirectly_ && i != 0) program_->functions[i].recursive = true;
    }
}

void Decoder::lay_out_frame(size_t index) {
    Scope& scope = scopes_[index];
    const ast::Function& function = *scope.function;
    FunctionCode& code = program_->functions[index];
    code.name = std::string(function.name);
    size_t offset = 0;
    const auto place = [&](const ast::Variable& variable) {
        offset = aligned(offset, std::max<size_t>(variable.align, 1));
        const size_t where = offset;
        offset += variable.size;
        if (offset > kMostFrame) invalid(variable.line, "a frame of more than 16 MiB");
        return static_cast<uint32_t>(where);
    };
    if (index == 0) {
        size_t at = 0;
        for (const ast::Variable& parameter : function.parameters) {
            at = aligned(at, parameter.align);
            scope.parameter_offsets[parameter.name] = static_cast<uint32_t>(at);
            at += parameter.size;
        }
    } else {
        for (const ast::Variable& parameter : function.parameters) {
            const uint32_t at = place(parameter);
            scope.parameter_offsets[parameter.name] = at;
            code.parameters.emplace_back(at, static_cast<uint32_t>(parameter.size));
        }
        for (const ast::Variable& result : function.returns) {
            const uint32_t at = place(result);
            scope.parameter_offsets[result.name] = at;
            code.results.emplace_back(at, static_cast<uint32_t>(result.size));
        }
    }
    for (size_t v = 0; v < function.variables.size(); ++v)
        if (function.variables[v].space != Space::shared)
            scope.variable_offsets[v] = place(function.variables[v]);
    code.frame_bytes = static_cast<uint32_t>(aligned(offset, 16));
    for (const ast::Register& reg : function.registers) {
        const bool predicate = reg.type == Type::pred;
        const bool wide = size_of(reg.type) >= 8;
        uint32_t slot = predicate ? allocate_predicate() : allocate(wide);
        if (reg.type == Type::b128) allocate(true);  // its upper half follows
        scope.register_slots.push_back(slot);
        if (!code.recursive) continue;
        (predicate ? code.saved_predicates : wide ? code.saved64 : code.saved32).push_back(slot);
        if (reg.type == Type::b128) code.saved64.push_back(slot + kLanes * 8);
    }
}

void Decoder::begin_block() {
    Block fresh;
    fresh.first = fresh.last = static_cast<uint32_t>(program_->ops.size());
    fresh.guard = always_;
    program_->blocks.push_back(fresh);
}

void Decoder::end_block(End end) {
    Block& done = block();
    done.end = end;
    done.last = static_cast<uint32_t>(program_->ops.size());
    done.guard = guard_;
    done.flip = flip_;
    done.line = statement_->line;
    begin_block();
}

void Decoder::function(size_t index) {
    scope_ = &scopes_[index];
    const ast::Function& function = *scope_->function;
    FunctionCode& code = program_->functions[index];
    code.entry_block = static_cast<uint32_t>(program_->blocks.size());
    if (!function.defined) {
        code.builtin = builtin_named(function.name);
        if (code.builtin == Builtin::none)
            unsupported(function.line, "the external function " + std::string(function.name));
        return;
    }
    std::vector<bool> labelled(function.statements.size());
    for (const ast::Scope& scope : function.scopes)
        for (const auto& [name, statement] : scope.labels) labelled[statement] = true;
    begin_block();
    for (size_t i = 0; i < function.statements.size(); ++i) {
        statement_ = &function.statements[i];
        if (labelled[i]) {
            guard_ = always_;
            flip_ = 0;
            if (block().first != program_->ops.size() || block().converge) end_block(End::next);
            scope_->label_blocks[i] = static_cast<uint32_t>(program_->blocks.size() - 1);
        }
        statement(function.statements[i]);
    }
    program_->blocks.pop_back();  // the last statement ended its block and began another
    for (const uint32_t at : scope_->fixups)
        program_->blocks[at].target = scope_->label_blocks.at(program_->blocks[at].target);
    for (auto& targets : program_->targets) {
        if (&targets < program_->targets.data() + targets_resolved_) continue;
        for (uint32_t& target : targets) target = scope_->label_blocks.at(target);
    }
    targets_resolved_ = program_->targets.size();
}

void Decoder::statement(const ast::Statement& statement) {
    guard_ = statement.guarded ? scope_->register_slots[statement.guard] : always_;
    flip_ = statement.guarded && statement.guard_negated ? kAllLanes : 0;
    widenings_.clear();
    if (!control() && !memory() && !conversion() && !arithmetic()) unknown();
    flush_targets();
}

}  // namespace phos::ptx
