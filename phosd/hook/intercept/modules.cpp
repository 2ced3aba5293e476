// Record the images of modules and libraries as they are loaded and unloaded.
#include "code/modules.h"

#include "base/overrides.h"
#include "code/kernels.h"

namespace phos {
namespace {

template <class Handle>
CUresult note_image(CUresult result, const Handle* handle, const void* image) {
    if (result == CUDA_SUCCESS && handle) modules::note_image(*handle, image);
    return result;
}

template <class Handle>
CUresult note_file(CUresult result, const Handle* handle, const char* path) {
    if (result == CUDA_SUCCESS && handle) modules::note_file(*handle, path);
    return result;
}

template <class Handle>
CUresult unload(Handle handle, CUresult (*unload)(Handle)) {
    modules::forget(handle);  // before the handle can be reused
    const CUresult result = unload(handle);
    kernels::forget_functions();
    return result;
}

}  // namespace

CUresult overrides::cuModuleLoad(CUmodule* module, const char* path) {
    return note_file(driver.cuModuleLoad(module, path), module, path);
}
CUresult overrides::cuModuleLoadData(CUmodule* module, const void* image) {
    return note_image(driver.cuModuleLoadData(module, image), module, image);
}
CUresult overrides::cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned count,
                                       CUjit_option* options, void** values) {
    return note_image(driver.cuModuleLoadDataEx(module, image, count, options, values), module,
                      image);
}
CUresult overrides::cuModuleLoadFatBinary(CUmodule* module, const void* image) {
    return note_image(driver.cuModuleLoadFatBinary(module, image), module, image);
}
CUresult overrides::cuLibraryLoadData(CUlibrary* library, const void* code,
                                      CUjit_option* jit_options, void** jit_values,
                                      unsigned jit_count, CUlibraryOption* options, void** values,
                                      unsigned count) {
    return note_image(driver.cuLibraryLoadData(library, code, jit_options, jit_values, jit_count,
                                               options, values, count),
                      library, code);
}
CUresult overrides::cuLibraryLoadFromFile(CUlibrary* library, const char* path,
                                          CUjit_option* jit_options, void** jit_values,
                                          unsigned jit_count, CUlibraryOption* options,
                                          void** values, unsigned count) {
    return note_file(driver.cuLibraryLoadFromFile(library, path, jit_options, jit_values, jit_count,
                                                  options, values, count),
                     library, path);
}
CUresult overrides::cuModuleUnload(CUmodule module) {
    return unload(module, driver.cuModuleUnload);
}
CUresult overrides::cuLibraryUnload(CUlibrary library) {
    return unload(library, driver.cuLibraryUnload);
}
CUresult overrides::cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    const CUresult result = driver.cuKernelGetFunction(function, kernel);
    if (result == CUDA_SUCCESS && function) modules::note(*function, modules::hash_of(kernel));
    return result;
}

}  // namespace phos
