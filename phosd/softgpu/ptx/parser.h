// Builds the tree of a module from its tokens.
#pragma once

#include <optional>

#include "ast.h"
#include "lexer.h"

namespace phos::ptx {

class Parser {
  public:
    explicit Parser(std::string_view source) : lexer_(source) {}
    ast::Module module();

  private:
    // The body of a function while it is read.
    struct Body {
        ast::Function* function;
        uint32_t scope;
        // Registers by name for each open scope; `%r<10>` is kept as its prefix and bounds.
        struct Names {
            std::map<std::string_view, uint32_t> exact;
            std::map<std::string_view, std::pair<uint32_t, uint32_t>> ranges;  // first, count
        };
        std::vector<Names> names;
    };

    bool at(std::string_view symbol) const;
    bool accept(std::string_view symbol);
    void expect(std::string_view symbol);
    bool at_directive() const { return lexer_.peek().kind == Token::Kind::directive; }
    std::string_view word(const char* what);
    int64_t integer();
    unsigned line() const { return lexer_.peek().line; }
    void skip_to_semicolon();
    void skip_braces();

    void section();
    void function(bool entry);
    std::vector<ast::Variable> parameter_list();
    void body(ast::Function& function);
    void registers(Body& body);
    void statement(Body& body);
    void branch_targets(Body& body, std::string_view label);

    ast::Variable variable(Space space);
    void initialiser(ast::Variable& variable, size_t& offset, unsigned depth);
    void add_module_variable(ast::Variable variable);

    ast::Operand operand(Body& body);
    ast::Operand simple_operand(Body& body);
    ast::Operand address(Body& body);
    ast::Operand list(Body& body, const char* close, ast::Operand::Kind kind);
    std::optional<uint32_t> find_register(const Body& body, std::string_view name) const;
    ast::Operand immediate(bool negative);

    Lexer lexer_;
    ast::Module module_;
};

}  // namespace phos::ptx
