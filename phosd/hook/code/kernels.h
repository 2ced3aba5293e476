// Identify the kernels that the program launches: their parameters, their module, and the board's
// entries for them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/driver.h"
#include "code/summaries.h"
#include "protocol/chunk_map.h"

namespace phos::kernels {

using Parameter = summaries::Parameter;

// Whether memory would be the same if a launch were run again.
enum Verdict : uint32_t {
    kIdempotent,  // what it reads is not overwritten by it
    kOverwrites,  // it may be
    kUndecided,   // not all that it accesses is known
    kVerdicts,
};

// One object for all functions with the same name, module and parameters. Never freed.
struct Kernel {
    std::string name;                   // from cuFuncGetName; empty if the driver does not tell
    uint64_t module;                    // hash of the module's image; 0 if unknown
    bool laid_out;                      // false: the driver does not tell the parameters
    std::vector<Parameter> parameters;  // by offset
    // What phosd's analysis says of it; null if nothing.
    std::atomic<const summaries::Summary*> summary{nullptr};

    // From the board, since the last arm().
    std::atomic<uint32_t> flags{0};  // board::KernelFlags
    std::atomic<uint64_t> written{0};
    // Launches by whether they could be run again, as far as that is known.
    std::atomic<uint64_t> verdicts[kVerdicts]{};
    // One of them was predicted by its arguments alone, or by what the user trusts.
    std::atomic<bool> guessed{false};
    std::atomic<uint64_t> launches{0};
    std::atomic<uint64_t> order{0};  // of the first launch, from 1; 0 if there was none
};

// Returns the kernel of a function, or of a CUkernel used as one. Takes no lock if the function was
// looked up before.
Kernel* find(CUfunction function);
void count_launch(Kernel* kernel, Verdict verdict, uint64_t times = 1);

// Whether launches are to be counted although nothing is armed.
extern std::atomic<bool> counting;
void count_afresh();

// Sets the board's entry of each kernel, and counts afresh. Needs a closed gate. `rows` are
// copied, as they may be in memory that the program writes.
void arm(const board::KernelRow* rows, size_t count);
// Changes with every arm(), and with every table of what kernels access.
uint64_t generation();

// Has the kernels of a module use what its table says, as those do that are found later.
void summarise(uint64_t module);

// Returns the kernels launched since arm(), by first launch.
std::vector<const Kernel*> launched();

// Forgets all functions: handles are reused after an unload.
void forget_functions();

}  // namespace phos::kernels
