// cuda.h stays out of this file: here the functions are only addresses, declared without types.
#include "api/lookup.h"

#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" {
#define ENTRY(name, since, symbol) void symbol();
#define STREAM_ENTRY(name, since, symbol, suffix) \
    void symbol();                                \
    void symbol##suffix();
#include "api/entry.def"
#undef ENTRY
#undef STREAM_ENTRY
}

namespace phos::softgpu {
namespace {

struct Entry {
    int since;
    void (*function)();
    void (*per_thread)();
};

const std::unordered_map<std::string, std::vector<Entry>>& table() {
    static const auto& entries = *[] {
        auto* map = new std::unordered_map<std::string, std::vector<Entry>>;
#define ENTRY(name, since, symbol) (*map)[#name].push_back({since, symbol, symbol});
#define STREAM_ENTRY(name, since, symbol, suffix) \
    (*map)[#name].push_back({since, symbol, symbol##suffix});
#include "api/entry.def"
#undef ENTRY
#undef STREAM_ENTRY
        return map;
    }();
    return entries;
}

}  // namespace

Lookup look_up(const char* name, int version, bool per_thread) {
    const auto found = table().find(name);
    if (found == table().end()) return {};
    const Entry* newest = nullptr;
    for (const Entry& entry : found->second)
        if (entry.since <= version && (!newest || entry.since > newest->since)) newest = &entry;
    if (!newest) return {nullptr, true};
    return {reinterpret_cast<void*>(per_thread ? newest->per_thread : newest->function), true};
}

}  // namespace phos::softgpu
