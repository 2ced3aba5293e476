#include "intercept/unsupported.h"

#include <link.h>

#include <cstring>

#include "base/overrides.h"
#include "base/process.h"

namespace phos {
namespace {

constexpr const char* kVariable = "the program uses managed memory (a __managed__ variable)";

CUresult note_use(CUresult result, Reason code, const char* reason) {
    if (result == CUDA_SUCCESS) mark_unsupported(code, reason);
    return result;
}

// Prefixes of library names, without the version, and their purpose.
constexpr struct {
    const char* name;
    const char* reason;
} kPrivate[] = {
    {"libnvidia-encode.so", "the program has NVENC loaded (libnvidia-encode)"},
    {"libnvcuvid.so", "the program has NVDEC loaded (libnvcuvid)"},
    {"libnvoptix.so", "the program has OptiX loaded (libnvoptix)"},
};

// Called under the loader's lock, so it only compares names.
int find_private(dl_phdr_info* object, size_t, void* reason) {
    if (!object->dlpi_name) return 0;
    const char* slash = std::strrchr(object->dlpi_name, '/');
    const char* name = slash ? slash + 1 : object->dlpi_name;
    for (const auto& each : kPrivate)
        if (std::strncmp(name, each.name, std::strlen(each.name)) == 0)
            *static_cast<const char**>(reason) = each.reason;
    return 0;
}

// A __managed__ variable can only be recognised by its address.
CUresult note_variable(CUresult result, const CUdeviceptr* address) {
    if (result == CUDA_SUCCESS && address) note_if_managed(*address, kVariable);
    return result;
}

}  // namespace

void note_if_managed(unsigned long long address, const char* reason) {
    int managed = 0;
    if (driver.cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) ==
            CUDA_SUCCESS &&
        managed)
        mark_unsupported(Reason::managed_memory, reason);
}

void note_libraries() {
    const char* reason = nullptr;
    dl_iterate_phdr(find_private, &reason);
    if (reason) mark_not_parkable(Reason::private_calls, reason);
}

// The hook does not know these contexts, and so cannot ask for their work.
CUresult overrides::cuGreenCtxCreate(CUgreenCtx* context, CUdevResourceDesc resources,
                                     CUdevice device, unsigned flags) {
    const CUresult result = driver.cuGreenCtxCreate(context, resources, device, flags);
    if (result == CUDA_SUCCESS)
        mark_not_parkable(Reason::green_context,
                          "the program uses green contexts (cuGreenCtxCreate)");
    return result;
}

CUresult overrides::cuLibraryGetManaged(CUdeviceptr* address, size_t* size, CUlibrary library,
                                        const char* name) {
    return note_use(driver.cuLibraryGetManaged(address, size, library, name),
                    Reason::managed_memory, kVariable);
}

CUresult overrides::cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* size, CUmodule module,
                                         const char* name) {
    return note_variable(driver.cuModuleGetGlobal_v2(address, size, module, name), address);
}

CUresult overrides::cuLibraryGetGlobal(CUdeviceptr* address, size_t* size, CUlibrary library,
                                       const char* name) {
    return note_variable(driver.cuLibraryGetGlobal(address, size, library, name), address);
}

CUresult overrides::cuImportExternalMemory(CUexternalMemory* memory,
                                           const CUDA_EXTERNAL_MEMORY_HANDLE_DESC* description) {
    return note_use(driver.cuImportExternalMemory(memory, description), Reason::external_memory,
                    "the program imports memory of another driver (cuImportExternalMemory)");
}

CUresult overrides::cuImportExternalSemaphore(
    CUexternalSemaphore* semaphore, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC* description) {
    return note_use(driver.cuImportExternalSemaphore(semaphore, description),
                    Reason::external_memory, "the program imports a semaphore of another driver");
}

}  // namespace phos
