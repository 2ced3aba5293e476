// Splits PTX text into tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "machine.h"

namespace phos::ptx {

// Thrown while a module is loaded; Module::load turns it into a Failure.
struct LoadError {
    CUresult code;
    std::string text;
};

[[noreturn]] void invalid(unsigned line, const std::string& what);
[[noreturn]] void unsupported(unsigned line, const std::string& what);

struct Token {
    enum class Kind : uint8_t { end, word, directive, integer, real32, real64, text, symbol };
    Kind kind = Kind::end;
    // Names with their % or $; directives without their dot; strings without their quotes.
    std::string_view text;
    unsigned line = 1;
    uint64_t bits = 0;      // an integer's value or a real's representation
    bool attached = false;  // no white space before it: tells `ld.global` from `.global`
};

class Lexer {
  public:
    explicit Lexer(std::string_view source);
    const Token& peek() const { return token_; }
    Token take();
    // PTX ends .loc and .file with their line, not with a semicolon.
    void skip_line();

  private:
    void advance();
    void skip_space();
    void number();
    std::string_view source_;
    size_t at_ = 0;
    unsigned line_ = 1;
    Token token_;
};

}  // namespace phos::ptx
