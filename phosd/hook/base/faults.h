// Fault points of the hook: places where a test makes something go wrong in the program. The
// variable PHOS_FAULT and the kinds are those of phosd/engine/faults.py. Here `raise` and `enospc`
// fail the step with an error of the driver, and `short` halves what the step moves or, where it
// moves nothing, loses the answer to the request that it belongs to. Points that are not the hook's
// are of no concern here.
#pragma once

#include "base/driver.h"

namespace phos::faults {

enum class Point : unsigned {
#define PHOS_FAULT_POINT(name, text) name,
#include "faults.def"
#undef PHOS_FAULT_POINT
};

// Reads the variable, once, before there are threads of the hook's.
void load();

// What the step is to fail with; CUDA_SUCCESS when it is not to.
CUresult point(Point where);

// True once for the thread that has met a fault of the kind `short`.
bool take_short();

// A step before which there is a point.
template <class Step>
CUresult step(Point where, Step run) {
    const CUresult fault = point(where);
    return fault == CUDA_SUCCESS ? run() : fault;
}

}  // namespace phos::faults
