#include "lexer.h"

#include <cstdlib>

namespace phos::ptx {
namespace {

bool is_digit(char c) {
    return c >= '0' && c <= '9';
}
bool is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_word(char c) {
    return is_letter(c) || is_digit(c) || c == '_' || c == '$' || c == '%';
}

int digit_value(char c) {
    if (is_digit(c)) return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return 99;
}

}  // namespace

void invalid(unsigned line, const std::string& what) {
    throw LoadError{CUDA_ERROR_INVALID_PTX, "PTX line " + std::to_string(line) + ": " + what};
}

void unsupported(unsigned line, const std::string& what) {
    throw LoadError{CUDA_ERROR_NOT_SUPPORTED, "PTX line " + std::to_string(line) + ": " + what +
                                                  " is not supported by the PHOS software GPU"};
}

Lexer::Lexer(std::string_view source) : source_(source) {
    advance();
}

Token Lexer::take() {
    Token taken = token_;
    advance();
    return taken;
}

void Lexer::skip_line() {
    // The look-ahead token may stand on a later line already; then there is nothing to skip.
    const unsigned line = line_;
    if (token_.kind == Token::Kind::end) return;
    while (token_.line == line && token_.kind != Token::Kind::end) {
        while (at_ < source_.size() && source_[at_] != '\n') ++at_;
        advance();
    }
}

void Lexer::skip_space() {
    while (at_ < source_.size()) {
        const char c = source_[at_];
        if (c == '\n') {
            ++line_;
            ++at_;
        } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') {
            ++at_;
        } else if (source_.compare(at_, 2, "//") == 0) {
            while (at_ < source_.size() && source_[at_] != '\n') ++at_;
        } else if (source_.compare(at_, 2, "/*") == 0) {
            const unsigned begun = line_;
            const size_t end = source_.find("*/", at_ + 2);
            if (end == std::string_view::npos) invalid(begun, "a comment that never ends");
            for (; at_ < end; ++at_)
                if (source_[at_] == '\n') ++line_;
            at_ = end + 2;
        } else {
            return;
        }
    }
}

void Lexer::number() {
    const size_t begin = at_;
    auto digits = [&](int base) {
        const size_t first = at_;
        uint64_t value = 0;
        while (at_ < source_.size() && digit_value(source_[at_]) < base) {
            const auto digit = static_cast<uint64_t>(digit_value(source_[at_++]));
            if (value > (UINT64_MAX - digit) / static_cast<uint64_t>(base))
                invalid(line_, "an integer of more than 64 bits");
            value = value * static_cast<uint64_t>(base) + digit;
        }
        if (at_ == first) invalid(line_, "a number without digits");
        return value;
    };
    const char second = begin + 1 < source_.size() ? source_[begin + 1] : '\0';
    token_.kind = Token::Kind::integer;
    if (source_[begin] == '0' &&
        (second == 'f' || second == 'F' || second == 'd' || second == 'D')) {
        at_ += 2;
        const bool wide = second == 'd' || second == 'D';
        const size_t first = at_;
        token_.bits = digits(16);
        if (at_ - first != (wide ? 16u : 8u)) invalid(line_, "a real number of the wrong length");
        token_.kind = wide ? Token::Kind::real64 : Token::Kind::real32;
    } else if (source_[begin] == '0' && (second == 'x' || second == 'X')) {
        at_ += 2;
        token_.bits = digits(16);
    } else if (source_[begin] == '0' && (second == 'b' || second == 'B')) {
        at_ += 2;
        token_.bits = digits(2);
    } else {
        size_t end = begin;
        while (end < source_.size() && is_digit(source_[end])) ++end;
        const bool real = end < source_.size() &&
                          (source_[end] == '.' || source_[end] == 'e' || source_[end] == 'E');
        if (real) {
            const std::string copy(source_.substr(begin, 64));
            char* stop = nullptr;
            const double value = std::strtod(copy.c_str(), &stop);
            at_ = begin + static_cast<size_t>(stop - copy.c_str());
            __builtin_memcpy(&token_.bits, &value, sizeof value);
            token_.kind = Token::Kind::real64;
        } else {
            token_.bits = digits(source_[begin] == '0' && end > begin + 1 ? 8 : 10);
        }
    }
    if (token_.kind == Token::Kind::integer && at_ < source_.size() && source_[at_] == 'U') ++at_;
    token_.text = source_.substr(begin, at_ - begin);
}

void Lexer::advance() {
    const size_t before = at_;
    skip_space();
    token_ = {};
    token_.line = line_;
    token_.attached = at_ == before;
    if (at_ >= source_.size() || source_[at_] == '\0') return;
    const char c = source_[at_];
    const char next = at_ + 1 < source_.size() ? source_[at_ + 1] : '\0';
    const size_t begin = at_;
    if (is_digit(c)) {
        number();
    } else if (c == '.' && (is_word(next))) {
        ++at_;
        while (at_ < source_.size() &&
               (is_word(source_[at_]) || source_.compare(at_, 2, "::") == 0))
            at_ += source_[at_] == ':' ? 2 : 1;
        token_.kind = Token::Kind::directive;
        token_.text = source_.substr(begin + 1, at_ - begin - 1);
    } else if (is_word(c)) {
        while (at_ < source_.size() && is_word(source_[at_])) ++at_;
        token_.kind = Token::Kind::word;
        token_.text = source_.substr(begin, at_ - begin);
    } else if (c == '"') {
        size_t end = begin + 1;
        while (end < source_.size() && source_[end] != '"' && source_[end] != '\n') ++end;
        if (end >= source_.size() || source_[end] != '"') invalid(line_, "a string without an end");
        token_.kind = Token::Kind::text;
        token_.text = source_.substr(begin + 1, end - begin - 1);
        at_ = end + 1;
    } else {
        ++at_;
        token_.kind = Token::Kind::symbol;
        token_.text = source_.substr(begin, 1);
    }
}

}  // namespace phos::ptx
