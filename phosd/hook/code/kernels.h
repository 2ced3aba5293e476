// The kernels that the program launches: what their parameters are, which module they came from,
// and what the board says of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/driver.h"
#include "protocol/chunk_map.h"

namespace phos::kernels {

struct Parameter {
    uint32_t offset;  // in the parameter buffer, bytes
    uint32_t size;
};

// One for all functions of the same name, module and parameters. Never freed.
struct Kernel {
    std::string name;                   // as cuFuncGetName gives it; empty when the driver does not
    uint64_t module;                    // hash of the module's image; 0 when it is not known
    bool laid_out;                      // false: the driver does not tell the parameters
    std::vector<Parameter> parameters;  // by offset

    // What the board says, of the time since arm() last ran.
    std::atomic<uint32_t> flags{0};  // board::KernelFlags
    std::atomic<uint64_t> written{0};
    std::atomic<uint64_t> launches{0};
    std::atomic<uint64_t> order{0};  // of the first launch, from 1; 0 when there was none
};

// The kernel behind a function, or behind a CUkernel that stands for one. Takes no lock when the
// function has been looked up before.
Kernel* find(CUfunction function);
void count_launch(Kernel* kernel, uint64_t times = 1);

// With a closed gate: what the board's table says of each kernel from now on, and all counts at 0.
// `rows` may lie in memory that the program writes; they are copied.
void arm(const board::KernelRow* rows, size_t count);
// Changes with every arm().
uint64_t generation();

// Kernels launched since arm(), in the order of their first launch.
std::vector<const Kernel*> launched();

// Handles are given again after what they stood for is unloaded: none is known any more.
void forget_functions();

}  // namespace phos::kernels
