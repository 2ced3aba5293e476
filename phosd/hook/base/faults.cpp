#include "base/faults.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>
#include <utility>

#include "base/log.h"

namespace phos::faults {
namespace {

using std::string_view;

enum class Kind : uint32_t { none, raise, kill, enospc, short_, hang };

struct Fault {
    const char* name;
    Kind kind = Kind::none;
    uint64_t visit = 0;  // the visit at which the fault happens, from 1 on
    std::atomic<uint64_t> visits{0};
};

Fault faults[] = {
#define PHOS_FAULT_POINT(name, text) {text},
#include "faults.def"
#undef PHOS_FAULT_POINT
};

bool any = false;
double longest_delay = 0;  // seconds
thread_local bool cut = false;

constexpr std::pair<string_view, Kind> kKinds[] = {
    {"raise", Kind::raise},  {"kill", Kind::kill}, {"enospc", Kind::enospc},
    {"short", Kind::short_}, {"hang", Kind::hang},
};

// Returns the part before the next separator, and removes both from the text.
string_view next(string_view* text, char separator) {
    const size_t end = text->find(separator);
    const string_view head = text->substr(0, end);
    *text = end == string_view::npos ? string_view() : text->substr(end + 1);
    return head;
}

bool is_number(string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == string_view::npos;
}

// Arms an entry of the form <point>[:n][:kind].
void arm(string_view entry) {
    const string_view name = next(&entry, ':');
    string_view word = next(&entry, ':');
    uint64_t visit = 1;
    if (is_number(word)) {
        visit = 0;
        for (const char digit : word) visit = visit * 10 + static_cast<uint64_t>(digit - '0');
        word = next(&entry, ':');
    }
    Kind kind = word.empty() ? Kind::raise : Kind::none;
    for (const auto& [text, its] : kKinds)
        if (word == text) kind = its;
    for (Fault& fault : faults)
        if (name == fault.name) {
            fault.kind = kind;
            fault.visit = visit;
            any |= kind != Kind::none;
        }
}

// Seldom as long as the longest delay.
void wait_for_a_while() {
    thread_local std::minstd_rand random(
        static_cast<unsigned>(std::chrono::steady_clock::now().time_since_epoch().count()));
    const double share = std::uniform_real_distribution<double>()(random);
    usleep(static_cast<useconds_t>(1e6 * longest_delay * share * share * share * share));
}

}  // namespace

void load() {
    const char* value = secure_getenv("PHOS_FAULT");
    for (string_view text = value ? value : ""; !text.empty();) arm(next(&text, ','));
    const char* delay = secure_getenv("PHOS_FAULT_DELAY");
    longest_delay = delay ? std::clamp(std::strtod(delay, nullptr), 0.0, 1.0) : 0;
    any |= longest_delay > 0;
}

CUresult point(Point where) {
    if (__builtin_expect(!any, 1)) return CUDA_SUCCESS;
    if (longest_delay > 0) wait_for_a_while();
    Fault& fault = faults[static_cast<unsigned>(where)];
    if (fault.kind == Kind::none || fault.visits.fetch_add(1) + 1 != fault.visit)
        return CUDA_SUCCESS;
    log::note("fault point %s", fault.name);
    switch (fault.kind) {
        case Kind::kill:
            kill(getpid(), SIGKILL);
            return CUDA_SUCCESS;
        case Kind::hang:
            prctl(PR_SET_NAME, "phos-hangs");
            for (;;) pause();
        case Kind::enospc:
            return CUDA_ERROR_OUT_OF_MEMORY;
        case Kind::short_:
            cut = true;
            return CUDA_SUCCESS;
        default:
            return CUDA_ERROR_UNKNOWN;
    }
}

bool take_short() {
    return std::exchange(cut, false);
}

}  // namespace phos::faults
