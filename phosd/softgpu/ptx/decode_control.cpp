// Branches, calls, barriers, and what the lanes of a warp do together.
#include "decode.h"

namespace phos::ptx {

bool Decoder::control() {
    const std::string_view name = statement_->opcode;
    if (name == "bra") {
        branch();
    } else if (name == "brx") {
        indexed_branch();
    } else if (name == "call") {
        call();
    } else if (name == "ret" || name == "exit" || name == "trap" || name == "brkpt") {
        Modifiers modifiers(*statement_);
        modifiers.take("uni");
        modifiers.finish();
        need(0);
        const bool kernel = scope_ == scopes_.data();
        end_block(name == "trap"             ? End::trap
                  : name == "brkpt"          ? End::breakpoint
                  : name == "exit" || kernel ? End::exit
                                             : End::ret);
    } else if (name == "bar" || name == "barrier") {
        barrier();
    } else if (name == "shfl") {
        shuffle();
    } else if (name == "vote") {
        vote();
    } else if (name == "match") {
        match();
    } else if (name == "redux") {
        warp_reduction();
    } else if (name == "elect") {
        Modifiers modifiers(*statement_);
        if (!modifiers.take("sync")) unknown();
        modifiers.finish();
        need(2);
        if (operand(0).kind != Kind::list) bad("needs a register and a predicate");
        const uint32_t members = source(1, Type::b32);
        converge(members);
        const uint32_t d = target(operand(0).items[0], Type::b32);
        emit("elect", d, 0, members, 0, target_predicate(operand(0).items[1]));
    } else if (name == "activemask") {
        Modifiers modifiers(*statement_);
        const Type type = modifiers.required_type();
        modifiers.finish();
        need(1);
        emit(handler("activemask", type), target(0, type));
    } else if (name == "nanosleep") {
        Modifiers modifiers(*statement_);
        modifiers.required_type();
        modifiers.finish();
        need(1);
        emit("nanosleep", 0, source(0, Type::u32));
    } else if (name == "griddepcontrol" || name == "setmaxnreg" || name == "pmevent") {
        // Launches never overlap here, registers are never short: nothing to wait for.
    } else {
        return false;
    }
    return true;
}

uint32_t Decoder::label(std::string_view name) const {
    const ast::Function& function = *scope_->function;
    for (uint32_t at = statement_->scope;; at = function.scopes[at].parent) {
        const auto found = function.scopes[at].labels.find(name);
        if (found != function.scopes[at].labels.end()) return static_cast<uint32_t>(found->second);
        if (at == 0) bad("there is no label " + std::string(name));
    }
}

void Decoder::branch() {
    Modifiers modifiers(*statement_);
    modifiers.take("uni");
    modifiers.finish();
    need(1);
    block().target = label(operand(0).name);
    scope_->fixups.push_back(static_cast<uint32_t>(program_->blocks.size() - 1));
    end_block(End::branch);
}

void Decoder::indexed_branch() {
    Modifiers modifiers(*statement_);
    if (!modifiers.take("idx")) unknown();
    modifiers.take("uni");
    modifiers.finish();
    need(2);
    const ast::Function& function = *scope_->function;
    const std::vector<std::string_view>* names = nullptr;
    for (uint32_t at = statement_->scope; names == nullptr; at = function.scopes[at].parent) {
        const auto found = function.scopes[at].target_lists.find(operand(1).name);
        if (found != function.scopes[at].target_lists.end())
            names = &found->second;
        else if (at == 0)
            bad("there is no list of targets " + std::string(operand(1).name));
    }
    std::vector<uint32_t> targets;
    for (const std::string_view name : *names) targets.push_back(label(name));
    const uint32_t index = source(0, Type::u32);
    block().index = index;
    block().extra = static_cast<uint32_t>(program_->targets.size());
    program_->targets.push_back(std::move(targets));
    end_block(End::indexed);
}

// Begins a block in the middle of a statement.
void Decoder::separate() {
    const uint32_t guard = guard_, flip = flip_;
    guard_ = always_;
    flip_ = 0;
    end_block(End::next);
    guard_ = guard;
    flip_ = flip;
}

// A call through a pointer is taken up again for the lanes that call something else, so nothing
// may stand before it in its block.
void Decoder::call() {
    Modifiers modifiers(*statement_);
    modifiers.take("uni");
    modifiers.finish();
    separate();
    CallSite site;
    const auto& operands = statement_->operands;
    size_t at = 0;
    const auto collect = [&](const Operand& list,
                             std::vector<std::pair<uint32_t, uint32_t>>& into) {
        for (const Operand& item : list.items) {
            uint32_t offset = 0;
            const ast::Variable* variable =
                item.kind == Kind::symbol ? local_variable(item.name, offset) : nullptr;
            if (!variable || variable->space != Space::param)
                unsupported(statement_->line, "a call whose argument is no .param variable");
            into.emplace_back(offset, static_cast<uint32_t>(variable->size));
        }
    };
    if (at < operands.size() && operands[at].kind == Kind::list)
        collect(operands[at++], site.results);
    if (at >= operands.size()) bad("calls nothing");
    const Operand& callee = operands[at++];
    if (at < operands.size() && operands[at].kind == Kind::list)
        collect(operands[at++], site.arguments);
    site.frame_bytes =
        program_->functions[static_cast<size_t>(scope_ - scopes_.data())].frame_bytes;
    site.return_block = static_cast<uint32_t>(program_->blocks.size());
    End end = End::call_indirect;
    if (callee.kind == Kind::symbol) {
        const auto found = module_.function_index.find(callee.name);
        if (found == module_.function_index.end())
            bad("there is no function " + std::string(callee.name));
        const uint32_t index = program_index_.at(found->second);
        const ast::Function& function = module_.functions[found->second];
        bool fits = function.parameters.size() == site.arguments.size() &&
                    function.returns.size() == site.results.size() && !function.entry;
        for (size_t i = 0; fits && i < site.arguments.size(); ++i)
            fits = function.parameters[i].size == site.arguments[i].second;
        for (size_t i = 0; fits && i < site.results.size(); ++i)
            fits = function.returns[i].size == site.results[i].second;
        if (!fits) bad("the arguments do not fit " + std::string(callee.name));
        block().target = index;
        end = End::call;
    } else {
        const uint32_t address = source(callee, Type::u64);
        block().index = address;
    }
    block().extra = static_cast<uint32_t>(program_->call_sites.size());
    program_->call_sites.push_back(std::move(site));
    end_block(end);
}

void Decoder::barrier() {
    Modifiers modifiers(*statement_);
    if (modifiers.take("warp")) {
        if (!modifiers.take("sync")) unknown();
        modifiers.finish();
        need(1);
        converge(source(0, Type::b32));
        emit("nothing", 0);
        return;
    }
    modifiers.take("cta");
    modifiers.take("aligned");
    const std::string_view kind = modifiers.take_any({"sync", "arrive", "red"});
    size_t at = 0;
    if (kind == "red") {
        const std::string_view operation = modifiers.take_any({"popc", "and", "or"});
        const Type type = modifiers.required_type();
        modifiers.finish();
        need(3, 4);
        if (operation.empty()) unknown();
        const uint32_t d = type == Type::pred ? target_predicate(operand(0)) : target(0, type);
        const Operand& last = statement_->operands.back();
        const uint32_t tested = predicate(last);
        const uint32_t index = source(1, Type::u32);
        const bool counted = statement_->operands.size() == 4;
        const uint32_t count = counted ? source(2, Type::u32) : 0;
        Block& here = block();
        here.d = d;
        here.source = tested;
        here.source_flip = last.negated ? kAllLanes : 0;
        here.index = index;
        here.counted = counted;
        here.count = count;
        end_block(operation == "popc"  ? End::barrier_popc
                  : operation == "and" ? End::barrier_and
                                       : End::barrier_or);
        return;
    }
    modifiers.finish();
    if (kind.empty()) unknown();
    need(1, 2);
    const uint32_t index = source(at, Type::u32);
    const bool counted = statement_->operands.size() == 2;
    if (kind == "arrive" && !counted) bad("needs a count of threads");
    const uint32_t count = counted ? source(1, Type::u32) : 0;
    Block& here = block();
    here.index = index;
    here.counted = counted;
    here.count = count;
    end_block(kind == "arrive" ? End::barrier_arrive : End::barrier_sync);
}

// The next operation is of several lanes: it begins a block that waits until they are together.
void Decoder::converge(uint32_t members) {
    separate();
    block().converge = true;
    block().members = members;
}

void Decoder::shuffle() {
    Modifiers modifiers(*statement_);
    if (!modifiers.take("sync")) unknown();
    const std::string_view mode = modifiers.take_any({"up", "down", "bfly", "idx"});
    const Type type = modifiers.required_type();
    modifiers.finish();
    need(5);
    const uint32_t a = source(1, type), b = source(2, Type::b32), c = source(3, Type::b32);
    converge(source(4, Type::b32));
    const Operand& to = operand(0);
    const bool pair = to.kind == Kind::list;
    const uint32_t d = target(pair ? to.items[0] : to, type);
    const uint32_t in_range = pair ? target_predicate(to.items[1]) : allocate_predicate();
    emit(handler("shfl." + std::string(mode), type), d, a, b, c, in_range);
}

void Decoder::vote() {
    Modifiers modifiers(*statement_);
    if (!modifiers.take("sync")) unknown();
    const std::string_view mode = modifiers.take_any({"all", "any", "uni", "ballot"});
    const Type type = modifiers.required_type();
    modifiers.finish();
    need(3);
    const uint32_t tested = predicate(operand(1));
    const uint32_t members = source(2, Type::b32);
    converge(members);
    const uint32_t d = mode == "ballot" ? target(0, type) : target_predicate(operand(0));
    emit(handler("vote." + std::string(mode), type), d, tested, members, 0,
         operand(1).negated ? kAllLanes : 0);
}

void Decoder::match() {
    Modifiers modifiers(*statement_);
    const std::string_view mode = modifiers.take_any({"any", "all"});
    if (!modifiers.take("sync")) unknown();
    const Type type = modifiers.required_type();
    modifiers.finish();
    need(3);
    const uint32_t a = source(1, type), members = source(2, Type::b32);
    converge(members);
    const Operand& to = operand(0);
    const bool pair = to.kind == Kind::list;
    const uint32_t d = target(pair ? to.items[0] : to, Type::b32);
    const uint32_t all = pair ? target_predicate(to.items[1]) : allocate_predicate();
    emit(handler("match." + std::string(mode), type), d, a, members, 0, all);
}

void Decoder::warp_reduction() {
    Modifiers modifiers(*statement_);
    if (!modifiers.take("sync")) unknown();
    const std::string_view operation =
        modifiers.take_any({"add", "min", "max", "and", "or", "xor"});
    const Type type = modifiers.required_type();
    modifiers.finish();
    need(3);
    const uint32_t a = source(1, type), members = source(2, Type::b32);
    converge(members);
    emit(handler("redux." + std::string(operation), type), target(0, type), a, members);
}

}  // namespace phos::ptx
