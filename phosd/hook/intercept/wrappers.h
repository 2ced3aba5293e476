// The table of hooked functions, generated from hooks.def.
#pragma once

namespace phos {

struct Hook {
    const char* name;
    void* wrapper;
    void** real;        // the member of `driver`
    bool asks = false;  // submits nothing
};

struct HookTable {
    const Hook* begin;
    const Hook* end;
};
HookTable hooks();        // wrapped functions
HookTable known_names();  // known but not wrapped; `real` is the hook's copy of the address

}  // namespace phos
