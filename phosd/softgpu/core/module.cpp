#include "core/module.h"

#include "core/error.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

std::unique_ptr<ptx::Module> load(const std::string& ptx, const ptx::Module::Allocate& allocate,
                                  std::string& log) {
#if PHOS_HAVE_PTX
    ptx::Failure failure;
    auto code = ptx::Module::load(ptx, allocate, failure);
    if (!failure && code) return code;
    log = failure.text;
    explain("a module was not loaded: " + failure.text);
    fail(failure.code);
#else
    (void)ptx;
    (void)allocate;
    log = "this build has no PTX machine; build with -DPHOS_SOFTGPU_PTX=ON";
    fail(CUDA_ERROR_NOT_SUPPORTED);
#endif
}

}  // namespace

Module::Module(ContextPtr context_, const std::string& ptx, std::string& log)
    : context(std::move(context_)) {
    Heap& heap = runtime().device(context->device).heap;
    try {
        code_ = load(
            ptx,
            [&](size_t size, size_t alignment, bool managed) {
                if (managed)
                    return managed_ = allocate_host(size, HostRange::Kind::managed,
                                                    CU_MEM_ATTACH_GLOBAL, context);
                variables_.push_back(heap.allocate(size, context.get(), alignment));
                return variables_.back();
            },
            log);
    } catch (...) {
        free_variables();
        throw;
    }
    for (const ptx::Kernel* kernel : code_->kernels())
        functions_.push_back(std::make_shared<Function>(*this, *kernel));
}

Module::~Module() {
    free_variables();
}

void Module::free_variables() {
    for (const uint64_t address : variables_) runtime().device(context->device).heap.free(address);
    // The end of the context may have come first.
    if (managed_ && runtime().host.find(managed_).address == managed_)
        release_host(
            runtime().host.remove(managed_, {HostRange::Kind::managed}, CUDA_ERROR_INVALID_VALUE));
}

std::shared_ptr<Function> Module::function(const std::string& name) const {
    for (const auto& function : functions_)
        if (function->kernel.name == name) return function;
    return nullptr;
}

const ptx::Variable* Module::variable(const std::string& name) const {
    for (const ptx::Variable& variable : code_->variables())
        if (variable.name == name) return &variable;
    return nullptr;
}

Library::Library(std::string ptx, std::string& log) : ptx_(std::move(ptx)) {
    outline_ = load(
        ptx_,
        [&](size_t size, size_t alignment, bool managed) {
            has_managed_ |= managed;
            scratch_.push_back(std::make_unique<std::byte[]>(size + alignment));
            const auto at = reinterpret_cast<uint64_t>(scratch_.back().get());
            return (at + alignment - 1) / alignment * alignment;
        },
        log);
    for (const ptx::Kernel* kernel : outline_->kernels())
        kernels_.push_back(std::make_shared<LibraryKernel>(*this, *kernel));
}

std::shared_ptr<LibraryKernel> Library::kernel(const std::string& name) const {
    for (const auto& kernel : kernels_)
        if (kernel->outline.name == name) return kernel;
    return nullptr;
}

ModulePtr Library::module(const ContextPtr& context) {
    std::lock_guard lock(mutex_);
    ModulePtr& module = modules_[context.get()];
    if (!module) {
        if (has_managed_ && modules_.size() > 1) {
            modules_.erase(context.get());
            explain("a library with a __managed__ variable is used in a second context");
            fail(CUDA_ERROR_NOT_SUPPORTED);
        }
        std::string log;
        module = std::make_shared<Module>(context, ptx_, log);
        module->library = this;
        runtime().modules.add(module);
        const auto device = static_cast<size_t>(context->device);
        for (size_t i = 0; i < kernels_.size(); ++i) {
            module->functions()[i]->settings = kernels_[i]->settings[device];
            runtime().functions.add(module->functions()[i]);
        }
    }
    return module;
}

void Library::forget(const Context& context) {
    std::lock_guard lock(mutex_);
    modules_.erase(&context);
}

void Library::unload() {
    std::lock_guard lock(mutex_);
    for (const auto& [context, module] : modules_) runtime().remove_module(module);
    modules_.clear();
}

}  // namespace phos::softgpu
