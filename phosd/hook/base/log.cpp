#include "base/log.h"

#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <mutex>

namespace phos::log {
namespace {

constexpr int kLines = 128;
constexpr int kWidth = 240;

std::mutex mutex;
char lines[kLines][kWidth];
unsigned long written = 0;

}  // namespace

void note(const char* format, ...) {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    const std::lock_guard lock(mutex);
    char* line = lines[written++ % kLines];
    const int head = std::snprintf(line, kWidth, "%lld.%03ld ", static_cast<long long>(now.tv_sec),
                                   now.tv_nsec / 1000000);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line + head, static_cast<size_t>(kWidth - head), format, arguments);
    va_end(arguments);
}

std::string text() {
    const std::lock_guard lock(mutex);
    std::string all;
    for (unsigned long i = written > kLines ? written - kLines : 0; i < written; ++i)
        all.append(lines[i % kLines]).push_back('\n');
    return all;
}

}  // namespace phos::log
