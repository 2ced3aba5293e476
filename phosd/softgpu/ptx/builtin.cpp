// printf and assert of the device.
#include <cstdio>
#include <cstring>

#include "block.h"

namespace phos::ptx {
namespace {

constexpr size_t kLongestText = 64 << 10;

// A value at a generic address, as the lane sees it.
template <class T>
T fetch(const Caller& caller, uint64_t address) {
    T value;
    if ((address & kWindowMask) == kLocalWindow) {
        const uint64_t offset = address & ~kWindowMask;
        if (sizeof(T) > caller.local_bytes || offset > caller.local_bytes - sizeof(T))
            bad_address(CUDA_ERROR_ILLEGAL_ADDRESS, offset, sizeof(T), Space::local, false);
        std::memcpy(&value, caller.local + offset, sizeof value);
        return value;
    }
    if ((address & kWindowMask) != 0 ||
        !caller.launch.memory->allows(address, sizeof(T), caller.launch.device, false))
        bad_address(CUDA_ERROR_ILLEGAL_ADDRESS, address, sizeof(T), Space::generic, false);
    std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
    return value;
}

std::string text_at(const Caller& caller, uint64_t address) {
    if (address == 0) return "(null)";
    std::string text;
    while (text.size() < kLongestText) {
        const char c = fetch<char>(caller, address + text.size());
        if (c == '\0') break;
        text += c;
    }
    return text;
}

// Reads the arguments in order; each stands at a multiple of its size.
class Arguments {
  public:
    Arguments(const Caller& caller, uint64_t begin) : caller_(caller), begin_(begin) {}
    template <class T>
    T next() {
        const uint64_t at = (offset_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
        offset_ = at + sizeof(T);
        ++count_;
        return fetch<T>(caller_, begin_ + at);
    }
    uint32_t count() const { return count_; }

  private:
    const Caller& caller_;
    uint64_t begin_, offset_ = 0;
    uint32_t count_ = 0;
};

template <class T>
void append(std::string& out, const std::string& format, T value) {
    const int length = std::snprintf(nullptr, 0, format.c_str(), value);
    if (length < 0) return;
    std::string text(static_cast<size_t>(length) + 1, '\0');
    std::snprintf(text.data(), text.size(), format.c_str(), value);
    text.pop_back();
    out += text;
}

// A width or precision: digits, or '*' for the next argument.
void number(const std::string& format, size_t& at, Arguments& arguments, std::string& flags) {
    if (at < format.size() && format[at] == '*') {
        ++at;
        flags += std::to_string(arguments.next<int32_t>());
        return;
    }
    for (unsigned digits = 0; at < format.size() && format[at] >= '0' && format[at] <= '9'; ++at)
        if (++digits <= 4) flags += format[at];
}

// One conversion, beginning behind its '%'; returns where it ends.
size_t convert(const Caller& caller, const std::string& format, size_t at, Arguments& arguments,
               std::string& out) {
    std::string flags = "%";
    while (at < format.size() && std::strchr("-+ #0", format[at])) flags += format[at++];
    number(format, at, arguments, flags);
    if (at < format.size() && format[at] == '.') {
        flags += format[at++];
        number(format, at, arguments, flags);
    }
    bool wide = false;
    while (at < format.size() && std::strchr("hlLqjzt", format[at])) wide |= format[at++] != 'h';
    if (at >= format.size()) {
        out += flags;
        return at;
    }
    const char kind = format[at++];
    if (kind == 'd' || kind == 'i') {
        append(out, flags + "lld",
               wide ? static_cast<long long>(arguments.next<int64_t>())
                    : static_cast<long long>(arguments.next<int32_t>()));
    } else if (std::strchr("uoxX", kind)) {
        append(out, flags + "ll" + kind,
               wide ? static_cast<unsigned long long>(arguments.next<uint64_t>())
                    : static_cast<unsigned long long>(arguments.next<uint32_t>()));
    } else if (kind == 'c') {
        append(out, flags + "c", arguments.next<int32_t>());
    } else if (kind == 'p') {
        append(out, flags + "p", reinterpret_cast<void*>(arguments.next<uint64_t>()));
    } else if (kind == 's') {
        append(out, flags + "s", text_at(caller, arguments.next<uint64_t>()).c_str());
    } else if (std::strchr("eEfFgGaA", kind)) {
        append(out, flags + kind, arguments.next<double>());
    } else {
        out += kind == '%' ? "%" : flags + kind;
    }
    return at;
}

}  // namespace

uint32_t device_printf(const Caller& caller, uint64_t format, uint64_t arguments) {
    const std::string text = text_at(caller, format);
    Arguments values(caller, arguments);
    std::string out;
    for (size_t at = 0; at < text.size();) {
        if (text[at] == '%')
            at = convert(caller, text, at + 1, values, out);
        else
            out += text[at++];
    }
    std::fwrite(out.data(), 1, out.size(), stdout);
    std::fflush(stdout);
    return values.count();
}

void assertion_failed(const Caller& caller, uint64_t message, uint64_t file, uint32_t line,
                      uint64_t function) {
    const std::string what = text_at(caller, message);
    const std::string where = text_at(caller, file) + ":" + std::to_string(line);
    std::fprintf(stderr, "%s: %s: block: [%u,%u,%u], thread: [%u,%u,%u] Assertion `%s` failed.\n",
                 where.c_str(), text_at(caller, function).c_str(), caller.block.x, caller.block.y,
                 caller.block.z, caller.thread.x, caller.thread.y, caller.thread.z, what.c_str());
    fault(CUDA_ERROR_ASSERT, "assertion `" + what + "` failed at " + where);
}

}  // namespace phos::ptx
