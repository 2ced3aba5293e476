#include "records.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

namespace twice {
namespace {

int file = -1;

std::string quoted(const std::string& value) {
    std::string found = "\"";
    for (const char letter : value) {
        const auto code = static_cast<unsigned char>(letter);
        if (code < 0x20 || code == '"' || code == '\\') {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
            found += escaped;
        } else {
            found += letter;
        }
    }
    return found + '"';
}

}  // namespace

std::string& Line::member(const char* key) {
    if (json_.size() > 1) json_ += ", ";
    return json_ += quoted(key) + ": ";
}

Line& Line::text(const char* key, const std::string& value) {
    member(key) += quoted(value);
    return *this;
}

Line& Line::number(const char* key, uint64_t value) {
    member(key) += std::to_string(value);
    return *this;
}

Line& Line::numbers(const char* key, const unsigned (&values)[3]) {
    member(key) += '[' + std::to_string(values[0]) + ", " + std::to_string(values[1]) + ", " +
                   std::to_string(values[2]) + ']';
    return *this;
}

Line& Line::bytes(const char* key, const std::vector<unsigned char>& value) {
    std::string& json = member(key);
    json += '"';
    for (const unsigned char byte : value) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", byte);
        json += digits;
    }
    json += '"';
    return *this;
}

Line& Line::pairs(const char* key, const std::vector<std::pair<uint64_t, uint64_t>>& values) {
    std::string& json = member(key);
    json += '[';
    for (const auto& [one, other] : values) {
        if (json.back() != '[') json += ", ";
        json += '[' + std::to_string(one) + ", " + std::to_string(other) + ']';
    }
    json += ']';
    return *this;
}

void Line::write() {
    json_ += "}\n";
    // The file is opened to append: lines of several processes do not mix. What cannot be written
    // is missed by who reads: an instance that has begun, and not ended.
    if (::write(file, json_.data(), json_.size()) < 0) std::perror("twice: its records");
}

bool open_records() {
    const char* const path = std::getenv("TWICE_RECORDS");
    if (path) file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    return file >= 0;
}

void note_skipped(const char* why) {
    static std::mutex mutex;
    static std::map<std::string, uint64_t> counts;
    const std::lock_guard lock(mutex);
    const uint64_t count = ++counts[why];
    if (!(count & (count - 1))) Line().text("skipped", why).number("times", count).write();
}

}  // namespace twice
