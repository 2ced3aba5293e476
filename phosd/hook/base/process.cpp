#include "base/process.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>

#include "base/log.h"

namespace phos {

std::atomic<bool> is_active{false};

namespace {

std::mutex fitness_mutex;
Fitness fitness_now{true, false, {}, ""};

constexpr const char* kCodes[] = {
#define PHOS_REASON(name, code) code,
#include "reasons.def"
#undef PHOS_REASON
};

void mark(bool unsupported, Reason code, const std::string& reason) {
    const std::lock_guard lock(fitness_mutex);
    if (unsupported ? fitness_now.unsupported : !fitness_now.parkable) return;
    log::note("%s: %s", unsupported ? "unsupported" : "not parkable", reason.c_str());
    // A reason that excludes all modes outweighs one that only excludes parking.
    if (unsupported || fitness_now.reason.empty()) {
        fitness_now.reason = reason;
        fitness_now.code = code_of(code);
    }
    fitness_now.unsupported |= unsupported;
    fitness_now.parkable = false;
}

uint64_t test_patience = 0;  // nanoseconds, 0 for none

}  // namespace

bool enabled() {
    static const bool on = [] {
        const char* value = std::getenv("PHOS_HOOK");
        return !value || std::strcmp(value, "off") != 0;
    }();
    return on;
}

const char* code_of(Reason reason) {
    return kCodes[static_cast<int>(reason)];
}

void mark_not_parkable(Reason code, const std::string& reason) {
    mark(false, code, reason);
}
void mark_unsupported(Reason code, const std::string& reason) {
    mark(true, code, reason);
}

Fitness fitness() {
    const std::lock_guard lock(fitness_mutex);
    return fitness_now;
}

void read_test_patience() {
    const char* const value = secure_getenv("PHOS_TEST_PATIENCE");
    if (!value || !*value) return;
    char* end = nullptr;
    const unsigned long milliseconds = std::strtoul(value, &end, 10);
    if (*end || milliseconds < 10 || milliseconds > 60'000) {
        log::note("PHOS_TEST_PATIENCE is not 10 to 60000 milliseconds: %s", value);
        return;
    }
    test_patience = milliseconds * 1'000'000;
}

uint64_t patience(uint64_t nanoseconds) {
    return test_patience ? test_patience : nanoseconds;
}

uint64_t began(int pid) {
    char text[1024];
    std::snprintf(text, sizeof text, "/proc/%d/stat", pid);
    const int file = open(text, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    if (got <= 0) return 0;
    text[got] = 0;
    const char* field = std::strrchr(text, ')');  // the name may contain anything
    if (!field || !*++field) return 0;
    const char state = field[1];
    if (state == 'Z' || state == 'X') return 0;
    for (int number = 2; number < 22; ++number) {
        field = std::strchr(field, ' ');
        if (!field) return 0;
        ++field;
    }
    return std::strtoull(field, nullptr, 10);
}

uint64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

void pause_for(long nanoseconds) {
    const KeepErrno keep;
    const timespec time{0, nanoseconds};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &time, nullptr);
}

}  // namespace phos
