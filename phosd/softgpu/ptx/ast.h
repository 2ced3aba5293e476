// A parsed module: names resolved to registers and variables, instructions still in PTX's own form.
// The views point into the source, which outlives the tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace phos::ptx::ast {

// A word of an initialiser that holds the address of another symbol.
struct Relocation {
    size_t offset;
    unsigned bytes;
    std::string_view symbol;
    int64_t addend;
    uint64_t mask;  // selects one byte of the address, 0 for all of it
    unsigned line;
};

struct Variable {
    std::string_view name;
    Space space = Space::none;
    Type type = Type::none;
    size_t align = 1;
    size_t size = 0;  // bytes; 0 for an array without bounds (extern shared memory)
    bool external = false;
    bool managed = false;  // in memory that the host reaches as well
    std::vector<std::byte> initial;
    std::vector<Relocation> relocations;
    unsigned line = 0;
};

struct Register {
    Type type;
};

struct Operand {
    enum class Kind : uint8_t { reg, integer, real32, real64, symbol, address, vector, sink, list };
    Kind kind = Kind::sink;
    bool negated = false;  // a predicate behind '!'
    uint32_t reg = 0;      // index of the register; in an address its base, if `has_reg`
    bool has_reg = false;
    std::string_view name;       // of a symbol, or of an address's base symbol
    uint64_t bits = 0;           // an immediate, or the offset of a symbol or address
    std::vector<Operand> items;  // of a vector, an argument list or a pair p|q
};

struct Statement {
    unsigned line = 0;
    std::string_view opcode;
    std::vector<std::string_view> modifiers;
    bool guarded = false, guard_negated = false;
    uint32_t guard = 0;
    uint32_t scope = 0;
    std::vector<Operand> operands;
};

struct Label {
    size_t statement;
};

struct Scope {
    uint32_t parent;
    std::map<std::string_view, size_t> labels;  // to a statement's index
    std::map<std::string_view, std::vector<std::string_view>> target_lists;  // .branchtargets
    std::map<std::string_view, uint32_t> variables;  // to Function::variables
};

struct Function {
    std::string_view name;
    bool entry = false;
    bool defined = false;
    unsigned line = 0;
    std::vector<Variable> returns, parameters;
    std::vector<Register> registers;
    std::vector<Variable> variables;  // .local, .shared and .param of the body
    std::vector<Statement> statements;
    std::vector<Scope> scopes;
    unsigned max_threads = 1024;
};

struct Module {
    std::vector<Variable> variables;
    std::map<std::string_view, size_t> variable_index;
    std::vector<Function> functions;
    std::map<std::string_view, size_t> function_index;
};

}  // namespace phos::ptx::ast

namespace phos::ptx {

// Throws LoadError.
ast::Module parse(std::string_view source);

}  // namespace phos::ptx
