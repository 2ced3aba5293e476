#include "parser.h"

#include <algorithm>
#include <cstring>

namespace phos::ptx {
namespace {

constexpr size_t kLargestVariable = size_t{1} << 34;
constexpr uint32_t kMostRegisters = 1u << 20;

std::string quoted(std::string_view text) {
    return "'" + std::string(text) + "'";
}

Space space_named(std::string_view name) {
    if (name == "global") return Space::global;
    if (name == "const") return Space::constant;
    if (name == "shared") return Space::shared;
    if (name == "local") return Space::local;
    if (name == "param") return Space::param;
    return Space::none;
}

}  // namespace

bool Parser::at(std::string_view symbol) const {
    return lexer_.peek().kind == Token::Kind::symbol && lexer_.peek().text == symbol;
}

bool Parser::accept(std::string_view symbol) {
    if (!at(symbol)) return false;
    lexer_.take();
    return true;
}

void Parser::expect(std::string_view symbol) {
    if (!accept(symbol))
        invalid(line(), "expected " + quoted(symbol) + ", found " + quoted(lexer_.peek().text));
}

std::string_view Parser::word(const char* what) {
    if (lexer_.peek().kind != Token::Kind::word)
        invalid(line(), std::string("expected ") + what + ", found " + quoted(lexer_.peek().text));
    return lexer_.take().text;
}

int64_t Parser::integer() {
    const bool negative = accept("-");
    if (!negative) accept("+");
    if (lexer_.peek().kind != Token::Kind::integer)
        invalid(line(), "expected an integer, found " + quoted(lexer_.peek().text));
    const uint64_t bits = lexer_.take().bits;
    return static_cast<int64_t>(negative ? 0 - bits : bits);
}

void Parser::skip_to_semicolon() {
    while (!at(";")) {
        if (lexer_.peek().kind == Token::Kind::end) invalid(line(), "expected ';' before the end");
        lexer_.take();
    }
    lexer_.take();
}

void Parser::skip_braces() {
    expect("{");
    for (unsigned depth = 1; depth > 0;) {
        if (lexer_.peek().kind == Token::Kind::end) invalid(line(), "expected '}' before the end");
        const Token token = lexer_.take();
        if (token.kind != Token::Kind::symbol) continue;
        if (token.text == "{") ++depth;
        if (token.text == "}") --depth;
    }
}

void Parser::section() {
    if (!at_directive()) word("the name of a section");
    lexer_.take();
    skip_braces();
}

ast::Module Parser::module() {
    bool external = false;
    bool versioned = false;
    while (lexer_.peek().kind != Token::Kind::end) {
        if (!at_directive()) {
            if (accept(";")) continue;
            invalid(line(), "expected a directive, found " + quoted(lexer_.peek().text));
        }
        const unsigned where = line();
        const std::string_view name = lexer_.take().text;
        if (name == "version") {
            versioned = true;
            lexer_.skip_line();
        } else if (!versioned) {
            invalid(where, "a module begins with .version");
        } else if (name == "target") {
            lexer_.skip_line();
        } else if (name == "address_size") {
            if (integer() != 64) unsupported(where, "an address size other than 64");
        } else if (name == "file" || name == "loc") {
            lexer_.skip_line();
        } else if (name == "section") {
            section();
        } else if (name == "pragma" || name == "alias") {
            if (name == "alias") unsupported(where, ".alias");
            skip_to_semicolon();
        } else if (name == "visible" || name == "weak" || name == "common") {
            external = false;
        } else if (name == "extern") {
            external = true;
        } else if (name == "entry" || name == "func") {
            function(name == "entry");
            external = false;
        } else if (const Space space = space_named(name);
                   space != Space::none && space != Space::param) {
            do {
                ast::Variable read = variable(space);
                read.external = external;
                add_module_variable(std::move(read));
            } while (accept(","));
            expect(";");
            external = false;
        } else {
            unsupported(where, "the directive ." + std::string(name));
        }
    }
    if (!versioned) invalid(line(), "the text holds no PTX module");
    return std::move(module_);
}

void Parser::add_module_variable(ast::Variable variable) {
    const auto [slot, fresh] =
        module_.variable_index.emplace(variable.name, module_.variables.size());
    if (fresh) {
        module_.variables.push_back(std::move(variable));
        return;
    }
    ast::Variable& known = module_.variables[slot->second];
    if (!known.external && !variable.external)
        invalid(variable.line, "the variable " + quoted(variable.name) + " is defined twice");
    if (known.external) known = std::move(variable);
}

ast::Variable Parser::variable(Space space) {
    ast::Variable result;
    result.space = space;
    size_t align = 0;
    unsigned lanes = 1;
    while (at_directive()) {
        const unsigned where = line();
        const std::string_view name = lexer_.take().text;
        if (const Type type = type_named(name); type != Type::none) {
            result.type = type;
        } else if (name == "align") {
            const int64_t value = integer();
            if (value < 1 || value > (1 << 16) || (value & (value - 1)))
                invalid(where, "an alignment that is no power of two");
            align = static_cast<size_t>(value);
        } else if (name == "v2" || name == "v4") {
            lanes = name == "v2" ? 2 : 4;
        } else if (name == "ptr") {
            // A hint about what a pointer parameter points to: `.ptr .global .align 8`.
            while (at_directive()) {
                if (lexer_.take().text == "align") integer();
            }
        } else if (name == "attribute") {
            expect("(");
            const std::string attribute(at_directive() ? lexer_.take().text : "");
            if (attribute != "managed")
                unsupported(where, "a variable's .attribute(." + attribute + ")");
            if (space != Space::global) invalid(where, "a .managed variable that is not .global");
            result.managed = true;
            expect(")");
        } else {
            unsupported(where, "the directive ." + std::string(name) + " in a declaration");
        }
    }
    result.line = line();
    result.name = word("the name of a variable");
    if (result.type == Type::none || result.type == Type::pred)
        invalid(result.line, "the variable " + quoted(result.name) + " has no type of memory");
    const size_t element = size_of(result.type) * lanes;
    result.align = align ? align : element;
    size_t count = 1;
    while (accept("[")) {
        if (accept("]")) {
            count = 0;
            continue;
        }
        const int64_t bound = integer();
        expect("]");
        if (bound < 0 ||
            static_cast<uint64_t>(bound) > kLargestVariable / element / std::max<size_t>(count, 1))
            invalid(result.line, "the variable " + quoted(result.name) + " is too large");
        count *= static_cast<size_t>(bound);
    }
    result.size = count * element;
    if (accept("=")) {
        size_t offset = 0;
        initialiser(result, offset, 0);
        if (count == 0) result.size = offset;  // the bounds come from the initialiser
        if (result.initial.size() > result.size)
            invalid(result.line, "too many values for " + quoted(result.name));
    }
    return result;
}

void Parser::initialiser(ast::Variable& variable, size_t& offset, unsigned depth) {
    const unsigned element = size_of(variable.type);
    if (accept("{")) {
        if (accept("}")) return;
        if (depth > 8) invalid(line(), "an initialiser nested too deeply");
        do initialiser(variable, offset, depth + 1);
        while (accept(","));
        expect("}");
        return;
    }
    if (offset > kLargestVariable) invalid(line(), "an initialiser that is too long");
    variable.initial.resize(offset + element);
    uint64_t mask = 0;
    const Token::Kind kind = lexer_.peek().kind;
    // `mask(symbol)` picks one byte of an address: 0xFF, 0xFF00, ...
    if (kind == Token::Kind::integer) {
        const Token number = lexer_.take();
        if (accept("(")) {
            mask = number.bits;
        } else {
            std::memcpy(&variable.initial[offset], &number.bits, std::min<size_t>(element, 8));
            offset += element;
            return;
        }
    }
    if (mask == 0 && kind != Token::Kind::word) {
        const bool negative = accept("-");
        const Token number = lexer_.take();
        uint64_t bits = number.bits;
        if (number.kind == Token::Kind::integer) {
            if (negative) bits = 0 - bits;
        } else if (number.kind == Token::Kind::real64 && element == 4) {
            double wide;
            std::memcpy(&wide, &bits, sizeof wide);
            const auto narrow = static_cast<float>(negative ? -wide : wide);
            bits = 0;
            std::memcpy(&bits, &narrow, sizeof narrow);
        } else if (number.kind == Token::Kind::real32 || number.kind == Token::Kind::real64) {
            if (negative) bits ^= 1ull << (number.kind == Token::Kind::real32 ? 31 : 63);
        } else {
            invalid(number.line, "expected a value, found " + quoted(number.text));
        }
        std::memcpy(&variable.initial[offset], &bits, std::min<size_t>(element, 8));
        offset += element;
        return;
    }
    ast::Relocation relocation{offset, element, {}, 0, mask, line()};
    std::string_view name = word("a symbol");
    const bool generic = name == "generic" && accept("(");
    if (generic) name = word("a symbol");
    relocation.symbol = name;
    if (generic) expect(")");
    if (at("+") || at("-")) relocation.addend = integer();
    if (mask) expect(")");
    if (!mask && element != 8)
        unsupported(relocation.line, "an address in an initialiser of less than 64 bits");
    variable.relocations.push_back(relocation);
    offset += element;
}

std::vector<ast::Variable> Parser::parameter_list() {
    std::vector<ast::Variable> result;
    expect("(");
    if (accept(")")) return result;
    do {
        const unsigned where = line();
        if (!at_directive()) invalid(where, "expected a parameter");
        const std::string_view space = lexer_.take().text;
        if (space == "reg") unsupported(where, "a parameter in a register");
        if (space != "param") invalid(where, "expected .param, found ." + std::string(space));
        result.push_back(variable(Space::param));
    } while (accept(","));
    expect(")");
    return result;
}

void Parser::function(bool entry) {
    ast::Function read;
    read.entry = entry;
    read.line = line();
    if (at_directive() && lexer_.peek().text == "attribute") unsupported(line(), ".attribute");
    if (!entry && at("(")) read.returns = parameter_list();
    read.name = word("the name of a function");
    if (at("(")) read.parameters = parameter_list();
    while (at_directive()) {
        const unsigned where = line();
        const std::string_view name = lexer_.take().text;
        if (name == "maxntid" || name == "reqntid") {
            int64_t threads = 1;
            do {
                const int64_t bound = integer();
                if (bound < 1 || bound > 1024) invalid(where, "a block of more than 1024 threads");
                threads *= bound;
            } while (accept(","));
            if (threads > 1024) invalid(where, "a block of more than 1024 threads");
            read.max_threads = static_cast<unsigned>(threads);
        } else if (name == "minnctapersm" || name == "maxnreg" || name == "maxnctapersm" ||
                   name == "maxclusterrank") {
            integer();
        } else if (name == "reqnctapercluster") {
            do integer();
            while (accept(","));
        } else if (name == "pragma") {
            skip_to_semicolon();
        } else if (name != "noreturn" && name != "explicitcluster" && name != "blocksareclusters") {
            unsupported(where, "the directive ." + std::string(name));
        }
    }
    read.defined = at("{");
    if (read.defined)
        body(read);
    else
        expect(";");
    const auto [slot, fresh] = module_.function_index.emplace(read.name, module_.functions.size());
    if (fresh) {
        module_.functions.push_back(std::move(read));
    } else if (read.defined) {
        ast::Function& known = module_.functions[slot->second];
        if (known.defined) invalid(read.line, quoted(read.name) + " is defined twice");
        known = std::move(read);
    }
}

}  // namespace phos::ptx
