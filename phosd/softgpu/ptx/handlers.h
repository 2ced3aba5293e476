// The handlers of operations, found by a canonical name such as "mad.lo.u32" or "add.f32.ftz".
#pragma once

#include <cstddef>
#include <string>

#include "program.h"

namespace phos::ptx {

struct HandlerEntry {
    const char* name;
    Handler handler;
};

struct HandlerTable {
    const HandlerEntry* entries;
    size_t count;
};

// The handler for this processor, or nullptr when there is none of that name.
Handler find_handler(const std::string& name);

#define PHOS_HANDLER_TABLES(X) \
    X(integer) X(bits) X(real) X(half) X(compare) X(convert) X(move) X(memory) X(atomic) X(warp)

#define PHOS_DECLARE(table) HandlerTable table##_handlers();
namespace isa_base {
PHOS_HANDLER_TABLES(PHOS_DECLARE)
}
namespace isa_v3 {
PHOS_HANDLER_TABLES(PHOS_DECLARE)
}
#undef PHOS_DECLARE

}  // namespace phos::ptx
