// Modules and libraries.
#include "core/module.h"

#include <cstdio>
#include <memory>

#include "api/api.h"
#include "core/submit.h"

using namespace phos;
using namespace phos::softgpu;

namespace {

// The log buffers that a program may give to a load.
class JitLog {
  public:
    JitLog(unsigned count, CUjit_option* options, void** values)
        : count_(count), options_(options), values_(values) {
        require(count == 0 || (options && values));
        for (unsigned i = 0; i < count; ++i) {
            require(options[i] < CU_JIT_NUM_OPTIONS);
            const auto number = static_cast<size_t>(reinterpret_cast<uintptr_t>(values[i]));
            if (options[i] == CU_JIT_ERROR_LOG_BUFFER) error_ = static_cast<char*>(values[i]);
            if (options[i] == CU_JIT_INFO_LOG_BUFFER) info_ = static_cast<char*>(values[i]);
            if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) error_size_ = number;
            if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) info_size_ = number;
        }
    }
    ~JitLog() {
        put(error_, error_size_, text, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
        put(info_, info_size_, "", CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES);
    }
    JitLog(const JitLog&) = delete;

    std::string text;

  private:
    // The size option is also where the driver says how much it wrote.
    void put(char* buffer, size_t size, const std::string& what, CUjit_option option) {
        if (buffer && size) std::snprintf(buffer, size, "%s", what.c_str());
        for (unsigned i = 0; i < count_; ++i)
            if (options_[i] == option)
                values_[i] = reinterpret_cast<void*>(std::min(size, what.size() + 1));
    }

    unsigned count_;
    CUjit_option* options_;
    void** values_;
    char *error_ = nullptr, *info_ = nullptr;
    size_t error_size_ = 0, info_size_ = 0;
};

struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
};

// The whole file, with a zero after it.
std::string read_file(const char* path) {
    require(path != nullptr);
    const std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path, "rbe"));
    require(file != nullptr, CUDA_ERROR_FILE_NOT_FOUND);
    std::string bytes;
    char part[65536];
    while (const size_t got = std::fread(part, 1, sizeof part, file.get())) bytes.append(part, got);
    return bytes;
}

void load_module(CUmodule* handle, const void* image, JitLog& log) {
    require(handle != nullptr);
    const ContextPtr context = current();
    forbid_during_capture();
    auto module = std::make_shared<Module>(context, ptx_of(image, log.text), log.text);
    *handle = runtime().modules.add(module);
    for (const auto& function : module->functions()) runtime().functions.add(function);
}

void load_library(CUlibrary* handle, const void* image, JitLog& log) {
    require(handle != nullptr);
    auto library = std::make_shared<Library>(ptx_of(image, log.text), log.text);
    *handle = runtime().libraries.add(library);
    for (const auto& kernel : library->kernels()) runtime().kernels.add(kernel);
}

template <typename Handle, typename Objects>
void enumerate(Handle* handles, unsigned count, const Objects& objects) {
    require(handles != nullptr || count == 0);
    for (unsigned i = 0; i < count; ++i)
        handles[i] = i < objects.size() ? reinterpret_cast<Handle>(objects[i].get()) : nullptr;
}

void get_global(CUdeviceptr* address, size_t* bytes, const Module& module, const char* name) {
    require(name != nullptr && (address || bytes));
    const ptx::Variable* variable = module.variable(name);
    require(variable != nullptr, CUDA_ERROR_NOT_FOUND);
    if (address) *address = variable->address;
    if (bytes) *bytes = variable->size;
}

std::shared_ptr<Library> library_of(CUlibrary handle) {
    return runtime().libraries.get(handle);
}
ModulePtr module_of(CUmodule handle) {
    return runtime().modules.get(handle);
}

}  // namespace

API(cuModuleLoadData, (CUmodule * module, const void* image), (module, image)) {
    JitLog log(0, nullptr, nullptr);
    load_module(module, image, log);
}
API(cuModuleLoadDataEx,
    (CUmodule * module, const void* image, unsigned count, CUjit_option* options, void** values),
    (module, image, count, options, values)) {
    JitLog log(count, options, values);
    load_module(module, image, log);
}
API(cuModuleLoadFatBinary, (CUmodule * module, const void* image), (module, image)) {
    JitLog log(0, nullptr, nullptr);
    load_module(module, image, log);
}
API(cuModuleLoad, (CUmodule * module, const char* path), (module, path)) {
    JitLog log(0, nullptr, nullptr);
    load_module(module, read_file(path).c_str(), log);
}

API(cuModuleUnload, (CUmodule handle), (handle)) {
    const ModulePtr module = module_of(handle);
    require(!module->library, CUDA_ERROR_NOT_PERMITTED);  // it belongs to a library
    forbid_during_capture();
    module->context->synchronize();
    runtime().remove_module(module);
}

API(cuModuleGetLoadingMode, (CUmoduleLoadingMode * mode), (mode)) {
    require(mode != nullptr);
    *mode = CU_MODULE_LAZY_LOADING;
}

API(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name),
    (function, module, name)) {
    require(function != nullptr && name != nullptr);
    const auto found = module_of(module)->function(name);
    require(found != nullptr, CUDA_ERROR_NOT_FOUND);
    *function = reinterpret_cast<CUfunction>(found.get());
}
API(cuModuleGetFunctionCount, (unsigned* count, CUmodule module), (count, module)) {
    require(count != nullptr);
    *count = static_cast<unsigned>(module_of(module)->functions().size());
}
API(cuModuleEnumerateFunctions, (CUfunction * functions, unsigned count, CUmodule module),
    (functions, count, module)) {
    enumerate(functions, count, module_of(module)->functions());
}
API(cuModuleGetGlobal_v2, (CUdeviceptr * address, size_t* bytes, CUmodule module, const char* name),
    (address, bytes, module, name)) {
    get_global(address, bytes, *module_of(module), name);
}

API(cuLibraryLoadData,
    (CUlibrary * library, const void* code, CUjit_option* options, void** values, unsigned count,
     CUlibraryOption* library_options, void** library_values, unsigned library_count),
    (library, code, options, values, count, library_options, library_values, library_count)) {
    (void)library_values;
    for (unsigned i = 0; i < library_count; ++i)
        require(library_options && library_options[i] < CU_LIBRARY_NUM_OPTIONS);
    JitLog log(count, options, values);
    load_library(library, code, log);
}
API(cuLibraryLoadFromFile,
    (CUlibrary * library, const char* path, CUjit_option* options, void** values, unsigned count,
     CUlibraryOption* library_options, void** library_values, unsigned library_count),
    (library, path, options, values, count, library_options, library_values, library_count)) {
    (void)library_values;
    for (unsigned i = 0; i < library_count; ++i)
        require(library_options && library_options[i] < CU_LIBRARY_NUM_OPTIONS);
    JitLog log(count, options, values);
    load_library(library, read_file(path).c_str(), log);
}
API(cuLibraryUnload, (CUlibrary handle), (handle)) {
    const auto library = runtime().libraries.remove(handle);
    runtime().kernels.remove_if(
        [&](const LibraryKernel& kernel) { return &kernel.library == library.get(); });
    library->unload();
}
API(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char* name),
    (kernel, library, name)) {
    require(kernel != nullptr && name != nullptr);
    const auto found = library_of(library)->kernel(name);
    require(found != nullptr, CUDA_ERROR_NOT_FOUND);
    *kernel = reinterpret_cast<CUkernel>(found.get());
}
API(cuLibraryGetKernelCount, (unsigned* count, CUlibrary library), (count, library)) {
    require(count != nullptr);
    *count = static_cast<unsigned>(library_of(library)->kernels().size());
}
API(cuLibraryEnumerateKernels, (CUkernel * kernels, unsigned count, CUlibrary library),
    (kernels, count, library)) {
    enumerate(kernels, count, library_of(library)->kernels());
}
API(cuLibraryGetModule, (CUmodule * module, CUlibrary library), (module, library)) {
    require(module != nullptr);
    *module = reinterpret_cast<CUmodule>(library_of(library)->module(current()).get());
}
API(cuLibraryGetGlobal, (CUdeviceptr * address, size_t* bytes, CUlibrary library, const char* name),
    (address, bytes, library, name)) {
    get_global(address, bytes, *library_of(library)->module(current()), name);
}
