// Loading a module: parse, place the variables, decode the kernels.
#include <algorithm>
#include <cstring>

#include "decode.h"
#include "machine.h"

namespace phos::ptx {
namespace {

class LoadedModule final : public Module {
  public:
    const std::vector<const Kernel*>& kernels() const override { return kernels_; }
    const std::vector<Variable>& variables() const override { return variables_; }

    void load(std::string_view ptx, const Allocate& allocate) {
        const ast::Module module = parse(ptx);
        const std::vector<uint64_t> addresses = place(module, allocate);
        initialise(module, addresses);
        for (const ast::Function& function : module.functions) {
            if (!function.entry || !function.defined) continue;
            owned_.push_back(Decoder(module, addresses).kernel(function));
            kernels_.push_back(owned_.back().get());
        }
    }

  private:
    std::vector<uint64_t> place(const ast::Module& module, const Allocate& allocate) {
        std::vector<uint64_t> addresses(module.variables.size());
        for (const bool managed : {false, true}) place(module, allocate, managed, addresses);
        return addresses;
    }

    // All variables of a kind share one allocation.
    void place(const ast::Module& module, const Allocate& allocate, bool managed,
               std::vector<uint64_t>& addresses) {
        size_t bytes = 0, alignment = 16;
        for (size_t i = 0; i < addresses.size(); ++i) {
            const ast::Variable& variable = module.variables[i];
            if (variable.space == Space::shared || variable.managed != managed) continue;
            if (variable.external)
                unsupported(variable.line, "the external variable " + std::string(variable.name));
            bytes = (bytes + variable.align - 1) / variable.align * variable.align;
            addresses[i] = bytes;
            bytes += variable.size;
            alignment = std::max(alignment, variable.align);
        }
        if (bytes == 0) return;
        const uint64_t base = allocate(bytes, alignment, managed);
        if (base == 0)
            throw LoadError{CUDA_ERROR_OUT_OF_MEMORY, "no memory for a module's variables (" +
                                                          std::to_string(bytes) + " bytes)"};
        std::memset(reinterpret_cast<void*>(base), 0, bytes);
        for (size_t i = 0; i < addresses.size(); ++i) {
            const ast::Variable& variable = module.variables[i];
            if (variable.space == Space::shared || variable.managed != managed) continue;
            addresses[i] += base;
            variables_.push_back({std::string(variable.name), addresses[i], variable.size,
                                  variable.space == Space::constant});
        }
    }

    static void initialise(const ast::Module& module, const std::vector<uint64_t>& addresses) {
        for (size_t i = 0; i < addresses.size(); ++i) {
            const ast::Variable& variable = module.variables[i];
            if (variable.space == Space::shared) {
                if (!variable.initial.empty())
                    invalid(variable.line, "shared memory cannot be initialised");
                continue;
            }
            auto* at = reinterpret_cast<std::byte*>(addresses[i]);
            if (!variable.initial.empty())
                std::memcpy(at, variable.initial.data(), variable.initial.size());
            for (const ast::Relocation& relocation : variable.relocations) {
                uint64_t value = address(module, addresses, relocation) +
                                 static_cast<uint64_t>(relocation.addend);
                if (relocation.mask)
                    value = (value & relocation.mask) >> __builtin_ctzll(relocation.mask);
                std::memcpy(at + relocation.offset, &value, relocation.bytes);
            }
        }
    }

    static uint64_t address(const ast::Module& module, const std::vector<uint64_t>& addresses,
                            const ast::Relocation& relocation) {
        if (const auto found = module.variable_index.find(relocation.symbol);
            found != module.variable_index.end()) {
            if (module.variables[found->second].space == Space::shared)
                unsupported(relocation.line, "the address of shared memory in an initialiser");
            return addresses[found->second];
        }
        if (const auto found = module.function_index.find(relocation.symbol);
            found != module.function_index.end())
            return kFunctionWindow | found->second;
        invalid(relocation.line, "the name " + std::string(relocation.symbol) + " is not declared");
    }

    std::vector<std::unique_ptr<KernelCode>> owned_;
    std::vector<const Kernel*> kernels_;
    std::vector<Variable> variables_;
};

}  // namespace

std::unique_ptr<Module> Module::load(std::string_view ptx, const Allocate& allocate,
                                     Failure& failure) {
    auto module = std::make_unique<LoadedModule>();
    try {
        module->load(ptx, allocate);
    } catch (const LoadError& error) {
        failure = {error.code, error.text};
        return nullptr;
    } catch (const std::bad_alloc&) {
        failure = {CUDA_ERROR_OUT_OF_MEMORY, "no host memory to load a module"};
        return nullptr;
    }
    failure = {};
    return module;
}

}  // namespace phos::ptx
