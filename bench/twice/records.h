// Lines of JSON about what was run twice, each written at once: the program may be killed any time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace twice {

class Line {
  public:
    Line& text(const char* key, const std::string& value);
    Line& number(const char* key, uint64_t value);
    Line& numbers(const char* key, const unsigned (&values)[3]);
    Line& bytes(const char* key, const std::vector<unsigned char>& value);
    Line& pairs(const char* key, const std::vector<std::pair<uint64_t, uint64_t>>& values);
    void write();

  private:
    std::string& member(const char* key);
    std::string json_ = "{";
};

// Takes the file that TWICE_RECORDS names. Returns false if it cannot be opened.
bool open_records();

// Writes that something was left out, the first time and whenever the number has doubled.
void note_skipped(const char* why);

}  // namespace twice
