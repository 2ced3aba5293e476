// The table of hooked functions, made from hooks.def.
#pragma once

namespace phos {

struct Hook {
    const char* name;
    void* wrapper;
    void** real;  // the member of `driver`
};

struct HookTable {
    const Hook* begin;
    const Hook* end;
};
HookTable hooks();        // what is wrapped
HookTable known_names();  // what is known and not wrapped; `real` is the hook's note of the address

}  // namespace phos
