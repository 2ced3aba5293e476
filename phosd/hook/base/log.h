// Keep the hook's log in a ring. Nothing is printed; the request `stats` returns it.
#pragma once

#include <string>

namespace phos::log {

// Adds a line (printf-style, cut at 200 bytes), with the time.
void note(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Returns the newest lines, oldest first.
std::string text();

}  // namespace phos::log
