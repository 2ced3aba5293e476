// Declares the wrappers written by hand, with the signatures of cuda.h.
#pragma once

#include "base/driver.h"

namespace phos::overrides {

#define PHOS_OWN(name) extern decltype(::name) name;
#define PHOS_ENTRY(name) extern decltype(::name) name;
#include "hooks.def"

}  // namespace phos::overrides
