// The PTX machine: loads a module from PTX text and runs its kernels on the CPU.
// It knows nothing of streams, contexts or the driver API, which call it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../address_space.h"

namespace phos::ptx {

// How a load or a launch failed: the driver's code, and a text that names the cause (the PTX line,
// the unknown instruction, the address).
struct Failure {
    CUresult code = CUDA_SUCCESS;
    std::string text;
    explicit operator bool() const { return code != CUDA_SUCCESS; }
};

struct Parameter {
    size_t offset;
    size_t size;
};

// A module-scope variable, with its address in the device's memory.
struct Variable {
    std::string name;
    uint64_t address;
    size_t size;
    bool constant;
};

// One entry function; the decoded code behind it is the machine's own.
struct Kernel {
    std::string name;
    std::vector<Parameter> parameters;
    size_t parameter_bytes = 0;
    size_t static_shared_bytes = 0;
    size_t local_bytes = 0;
    unsigned registers = 0;
    unsigned max_threads = 1024;
    virtual ~Kernel() = default;
};

class Module {
  public:
    // `allocate(size, alignment, managed)` returns memory for the variables, 0 when there is none;
    // `managed`: that the host reaches as well. It is called at most once for each kind; what it
    // gave is the caller's to free, also after a failed load.
    using Allocate = std::function<uint64_t(size_t size, size_t alignment, bool managed)>;
    static std::unique_ptr<Module> load(std::string_view ptx, const Allocate& allocate,
                                        Failure& failure);
    virtual ~Module() = default;
    virtual const std::vector<const Kernel*>& kernels() const = 0;
    virtual const std::vector<Variable>& variables() const = 0;
};

// Ground truth for speculation: what a launch read and wrote, as merged ranges.
class AccessTrace {
  public:
    virtual ~AccessTrace() = default;
    virtual void record(uint64_t address, uint32_t bytes, bool write) = 0;
};

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

struct Launch {
    const Kernel* kernel = nullptr;
    Dim3 grid, block, cluster;
    size_t dynamic_shared_bytes = 0;
    const std::byte* parameters = nullptr;  // kernel->parameter_bytes of them
    bool cooperative = false;               // every block makes progress: grid-wide barriers work
    unsigned device = 0;
    const softgpu::AddressSpace* memory = nullptr;
    AccessTrace* trace = nullptr;                   // optional; must be thread-safe
    const std::atomic<bool>* abandon = nullptr;     // optional: give up soon when it turns true
    std::atomic<uint64_t>* instructions = nullptr;  // optional: counts thread instructions run
};

// Runs the whole grid on the calling thread, so that equal launches give equal bits even where the
// order of atomic additions matters. Blocks that wait for others, for other launches or for other
// processes make progress; a thread that only spins yields the processor now and then.
Failure run(const Launch& launch);

}  // namespace phos::ptx
