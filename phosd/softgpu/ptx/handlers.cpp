#include "handlers.h"

#include <cstdlib>
#include <string_view>
#include <unordered_map>

namespace phos::ptx {
namespace {

using Map = std::unordered_map<std::string, Handler>;

Map handlers_of_processor() {
    Map map;
    const auto add = [&](HandlerTable table) {
        for (size_t i = 0; i < table.count; ++i)
            map.emplace(table.entries[i].name, table.entries[i].handler);
    };
#define PHOS_ADD_V3(table) add(isa_v3::table##_handlers());
#define PHOS_ADD_BASE(table) add(isa_base::table##_handlers());
#ifdef PHOS_X86
    // PHOS_SOFTGPU_ISA=base leaves newer instructions unused, to compare the sets.
    const char* chosen = std::getenv("PHOS_SOFTGPU_ISA");
    const std::string_view most = chosen ? chosen : "v3";
    if (most != "base" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2")) {
        PHOS_HANDLER_TABLES(PHOS_ADD_V3)
        return map;
    }
#endif
    PHOS_HANDLER_TABLES(PHOS_ADD_BASE)
    return map;
}

}  // namespace

Handler find_handler(const std::string& name) {
    // Never destroyed: other threads may load modules while the process exits.
    static const Map& map = *new Map(handlers_of_processor());
    const auto found = map.find(name);
    return found == map.end() ? nullptr : found->second;
}

}  // namespace phos::ptx
