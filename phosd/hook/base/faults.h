// Fault points of the hook: places where tests make something go wrong in the program. The variable
// PHOS_FAULT and the kinds are those of phosd/engine/faults.py. In the hook `raise` and `enospc`
// fail the step with a driver error, and `short` halves what the step moves, or, if it moves
// nothing, loses the answer to its request. Points of other processes are ignored. PHOS_FAULT_DELAY
// is theirs, too.
#pragma once

#include "base/driver.h"

namespace phos::faults {

enum class Point : unsigned {
#define PHOS_FAULT_POINT(name, text) name,
#include "faults.def"
#undef PHOS_FAULT_POINT
};

// Reads the variables, once, before the hook has threads.
void load();

// Returns the error with which the step must fail, or CUDA_SUCCESS.
CUresult point(Point where);

// Returns true once, on the thread that has met a fault of kind `short`.
bool take_short();

// Runs a step after visiting its fault point.
template <class Step>
CUresult step(Point where, Step run) {
    const CUresult fault = point(where);
    return fault == CUDA_SUCCESS ? run() : fault;
}

}  // namespace phos::faults
