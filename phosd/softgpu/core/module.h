// Modules and libraries: code loaded into a context, and code that loads itself where it is used.
#pragma once

#include <cuda.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/context.h"
#include "ptx/machine.h"

namespace phos::softgpu {

class Module;
class Library;

// What a program may set for a kernel.
struct KernelSettings {
    std::atomic<int> max_dynamic_shared{0};  // bytes
    std::atomic<int> carveout{-1};
    std::array<std::atomic<int>, 3> cluster{};  // required cluster size; zeros: none
    std::atomic<int> scheduling{0};
    std::atomic<bool> large_clusters{false};
};

// One kernel in one context (CUfunction).
struct Function {
    Function(Module& module_, const ptx::Kernel& kernel_) : module(module_), kernel(kernel_) {}
    Module& module;
    const ptx::Kernel& kernel;
    // A library's functions share the settings of their kernel on the device.
    std::shared_ptr<KernelSettings> settings = std::make_shared<KernelSettings>();
};

// Code as the program hands it over: PTX text, or a container with PTX in it.
// Throws CUDA_ERROR_NO_BINARY_FOR_GPU, with the reason in `log`, for machine code alone.
std::string ptx_of(const void* image, std::string& log);

class Module : public std::enable_shared_from_this<Module> {
  public:
    // Throws the machine's code, with its text in `log`.
    Module(ContextPtr context, const std::string& ptx, std::string& log);
    ~Module();

    std::shared_ptr<Function> function(const std::string& name) const;  // null: not there
    const std::vector<std::shared_ptr<Function>>& functions() const { return functions_; }
    const ptx::Variable* variable(const std::string& name) const;

    const ContextPtr context;
    Library* library = nullptr;  // that loaded it

  private:
    void free_variables();

    std::unique_ptr<ptx::Module> code_;
    std::vector<std::shared_ptr<Function>> functions_;
    std::vector<uint64_t> variables_;  // device memory
    uint64_t managed_ = 0;             // memory of the variables that the host reaches as well
};
using ModulePtr = std::shared_ptr<Module>;

// One kernel of a library (CUkernel): a function in each context that uses it.
struct LibraryKernel {
    LibraryKernel(Library& library_, const ptx::Kernel& outline_)
        : library(library_), outline(outline_) {
        for (auto& device : settings) device = std::make_shared<KernelSettings>();
    }
    Library& library;
    const ptx::Kernel& outline;
    std::array<std::shared_ptr<KernelSettings>, 4> settings;  // by device
};

class Library : public std::enable_shared_from_this<Library> {
  public:
    Library(std::string ptx, std::string& log);

    std::shared_ptr<LibraryKernel> kernel(const std::string& name) const;
    const std::vector<std::shared_ptr<LibraryKernel>>& kernels() const { return kernels_; }
    // The library's module in a context; loads it the first time.
    ModulePtr module(const ContextPtr& context);
    void forget(const Context& context);
    void unload();

  private:
    const std::string ptx_;
    // The code without a device, to know what is in it; its variables lie in plain memory.
    std::vector<std::unique_ptr<std::byte[]>> scratch_;
    bool has_managed_ = false;
    std::unique_ptr<ptx::Module> outline_;
    std::vector<std::shared_ptr<LibraryKernel>> kernels_;
    std::mutex mutex_;
    std::map<const Context*, ModulePtr> modules_;
};

}  // namespace phos::softgpu
