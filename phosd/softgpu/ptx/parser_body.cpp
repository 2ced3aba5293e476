// The parser's half that reads the bodies of functions.
#include <cstring>

#include "parser.h"

namespace phos::ptx {
namespace {

constexpr uint32_t kMostRegisters = 1u << 20;
constexpr size_t kDeepestNesting = 64;

std::string quoted(std::string_view text) {
    return "'" + std::string(text) + "'";
}

}  // namespace

void Parser::body(ast::Function& function) {
    Body body{&function, 0, {{}}};
    function.scopes.push_back({0, {}, {}, {}});
    expect("{");
    std::vector<uint32_t> open{0};
    while (true) {
        if (lexer_.peek().kind == Token::Kind::end) invalid(line(), "a function without its '}'");
        if (accept("}")) {
            open.pop_back();
            body.names.pop_back();
            if (open.empty()) break;
            body.scope = open.back();
        } else if (accept("{")) {
            if (open.size() > kDeepestNesting) invalid(line(), "blocks nested too deeply");
            const auto fresh = static_cast<uint32_t>(function.scopes.size());
            function.scopes.push_back({body.scope, {}, {}, {}});
            open.push_back(fresh);
            body.scope = fresh;
            body.names.emplace_back();
        } else {
            statement(body);
        }
    }
    // A label may stand behind the last instruction; falling off the end returns.
    ast::Statement end;
    end.line = line();
    end.opcode = function.entry ? "exit" : "ret";
    function.statements.push_back(end);
}

void Parser::registers(Body& body) {
    Type type = Type::none;
    while (at_directive()) {
        const unsigned where = line();
        const std::string_view name = lexer_.take().text;
        type = type_named(name);
        if (type == Type::none) unsupported(where, "a register of type ." + std::string(name));
    }
    if (type == Type::none) invalid(line(), "a register without a type");
    auto& all = body.function->registers;
    Body::Names& names = body.names.back();
    do {
        const std::string_view name = word("the name of a register");
        uint32_t count = 1;
        if (accept("<")) {
            const int64_t bound = integer();
            expect(">");
            if (bound < 0 || bound > kMostRegisters) invalid(line(), "too many registers");
            count = static_cast<uint32_t>(bound);
            names.ranges[name] = {static_cast<uint32_t>(all.size()), count};
        } else {
            names.exact[name] = static_cast<uint32_t>(all.size());
        }
        if (all.size() + count > kMostRegisters) invalid(line(), "too many registers");
        all.insert(all.end(), count, {type});
    } while (accept(","));
    expect(";");
}

std::optional<uint32_t> Parser::find_register(const Body& body, std::string_view name) const {
    size_t digits = name.size();
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') --digits;
    uint32_t number = 0;
    const bool numbered = digits < name.size() && name.size() - digits < 8;
    if (numbered)
        for (size_t i = digits; i < name.size(); ++i)
            number = number * 10 + static_cast<uint32_t>(name[i] - '0');
    for (auto names = body.names.rbegin(); names != body.names.rend(); ++names) {
        if (const auto found = names->exact.find(name); found != names->exact.end())
            return found->second;
        if (!numbered) continue;
        // `%rd<10>` and `%r<10>`, but also `%f1_<4>`: the prefix may itself end in a digit.
        for (size_t cut = digits; cut < name.size(); ++cut) {
            const auto range = names->ranges.find(name.substr(0, cut));
            if (range == names->ranges.end()) continue;
            uint32_t index = 0;
            for (size_t i = cut; i < name.size(); ++i)
                index = index * 10 + static_cast<uint32_t>(name[i] - '0');
            if (index < range->second.second) return range->second.first + index;
        }
    }
    return std::nullopt;
}

void Parser::branch_targets(Body& body, std::string_view label) {
    auto& targets = body.function->scopes[body.scope].target_lists[label];
    do targets.push_back(word("a label"));
    while (accept(","));
    expect(";");
}

void Parser::statement(Body& body) {
    ast::Function& function = *body.function;
    const unsigned where = line();
    if (at_directive()) {
        const std::string_view name = lexer_.take().text;
        if (name == "reg") return registers(body);
        if (name == "loc" || name == "file") return lexer_.skip_line();
        if (name == "pragma") return skip_to_semicolon();
        if (name == "section") return section();
        Space space = Space::none;
        if (name == "local") space = Space::local;
        if (name == "shared") space = Space::shared;
        if (name == "param") space = Space::param;
        if (name == "global" || name == "const") {
            // Static variables of a kernel: the module's storage under the function's name.
            add_module_variable(variable(name == "global" ? Space::global : Space::constant));
            return expect(";");
        }
        if (space == Space::none) unsupported(where, "the directive ." + std::string(name));
        do {
            ast::Variable read = variable(space);
            auto& known = function.scopes[body.scope].variables;
            if (!known.emplace(read.name, static_cast<uint32_t>(function.variables.size())).second)
                invalid(where, quoted(read.name) + " is declared twice");
            function.variables.push_back(std::move(read));
        } while (accept(","));
        return expect(";");
    }
    ast::Statement result;
    result.line = where;
    result.scope = body.scope;
    if (accept("@")) {
        result.guarded = true;
        result.guard_negated = accept("!");
        const std::string_view name = word("a predicate");
        const auto found = find_register(body, name);
        if (!found || function.registers[*found].type != Type::pred)
            invalid(where, quoted(name) + " is no predicate");
        result.guard = *found;
    }
    const std::string_view first = word("an instruction");
    if (!result.guarded && accept(":")) {
        if (at_directive() && lexer_.peek().text == "branchtargets") {
            lexer_.take();
            return branch_targets(body, first);
        }
        if (at_directive() && lexer_.peek().text == "callprototype") return skip_to_semicolon();
        if (!function.scopes[body.scope].labels.emplace(first, function.statements.size()).second)
            invalid(where, "the label " + quoted(first) + " stands twice");
        return;
    }
    result.opcode = first;
    while (at_directive()) result.modifiers.push_back(lexer_.take().text);
    if (!at(";")) {
        do {
            ast::Operand read = operand(body);
            if (accept("|")) {
                ast::Operand pair;
                pair.kind = ast::Operand::Kind::list;
                pair.items.push_back(std::move(read));
                pair.items.push_back(operand(body));
                read = std::move(pair);
            }
            result.operands.push_back(std::move(read));
        } while (accept(","));
    }
    expect(";");
    function.statements.push_back(std::move(result));
}

ast::Operand Parser::immediate(bool negative) {
    ast::Operand result;
    const Token token = lexer_.take();
    result.bits = token.bits;
    if (token.kind == Token::Kind::integer) {
        result.kind = ast::Operand::Kind::integer;
        if (negative) result.bits = 0 - result.bits;
    } else if (token.kind == Token::Kind::real32) {
        result.kind = ast::Operand::Kind::real32;
        if (negative) result.bits ^= 1ull << 31;
    } else if (token.kind == Token::Kind::real64) {
        result.kind = ast::Operand::Kind::real64;
        if (negative) result.bits ^= 1ull << 63;
    } else {
        invalid(token.line, "expected an operand, found " + quoted(token.text));
    }
    return result;
}

ast::Operand Parser::list(Body& body, const char* close, ast::Operand::Kind kind) {
    ast::Operand result;
    result.kind = kind;
    if (accept(close)) return result;
    do result.items.push_back(simple_operand(body));
    while (accept(","));
    expect(close);
    return result;
}

ast::Operand Parser::operand(Body& body) {
    if (accept("{")) return list(body, "}", ast::Operand::Kind::vector);
    if (accept("(")) return list(body, ")", ast::Operand::Kind::list);
    if (accept("[")) return address(body);
    return simple_operand(body);
}

ast::Operand Parser::simple_operand(Body& body) {
    if (accept("-")) return immediate(true);
    if (accept("~")) {
        ast::Operand result = immediate(false);
        result.bits = ~result.bits;
        return result;
    }
    ast::Operand result;
    result.negated = accept("!");
    if (lexer_.peek().kind != Token::Kind::word) return immediate(false);
    const std::string_view name = lexer_.take().text;
    if (name == "_") return result;
    if (const auto found = find_register(body, name)) {
        result.kind = ast::Operand::Kind::reg;
        result.reg = *found;
        result.has_reg = true;
        if (at_directive() && lexer_.peek().attached)
            unsupported(line(), "a component of the register " + std::string(name));
        return result;
    }
    result.kind = ast::Operand::Kind::symbol;
    result.name = name;
    if (name[0] == '%' && at_directive() && lexer_.peek().attached) {
        // The view is widened over the component: `%tid.x`.
        const std::string_view part = lexer_.take().text;
        result.name = {name.data(), static_cast<size_t>(part.data() + part.size() - name.data())};
    }
    if (at("+") || at("-")) result.bits = static_cast<uint64_t>(integer());
    return result;
}

ast::Operand Parser::address(Body& body) {
    ast::Operand result;
    result.kind = ast::Operand::Kind::address;
    if (lexer_.peek().kind == Token::Kind::word) {
        const std::string_view name = lexer_.take().text;
        if (const auto found = find_register(body, name)) {
            result.reg = *found;
            result.has_reg = true;
        } else {
            result.name = name;
        }
        if (at("+") || at("-")) {
            accept("+");
            result.bits = static_cast<uint64_t>(integer());
        }
    } else {
        result.bits = static_cast<uint64_t>(integer());
    }
    expect("]");
    return result;
}

ast::Module parse(std::string_view source) {
    return Parser(source).module();
}

}  // namespace phos::ptx
