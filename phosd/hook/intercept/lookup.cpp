// Intercept how programs find driver functions: dlsym and cuGetProcAddress. The real lookup runs
// first, and the wrapper is chosen by the address that it returns: one name stands for several
// functions.
#include <dlfcn.h>
#include <link.h>

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "base/driver.h"
#include "base/log.h"
#include "base/overrides.h"
#include "base/process.h"
#include "intercept/unknown_functions.h"
#include "intercept/wrappers.h"

namespace phos {

namespace {

using Dlsym = void* (*)(void*, const char*);

// A sanitizer looks up its functions before its shadow memory exists.
#define PHOS_NOT_SANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

PHOS_NOT_SANITIZED Dlsym real_dlsym() {
    static Dlsym found = nullptr;
    Dlsym function = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
    if (!function) function = reinterpret_cast<Dlsym>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
    if (!function) function = reinterpret_cast<Dlsym>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34"));
    __atomic_store_n(&found, function, __ATOMIC_RELEASE);
    return function;
}

link_map* object_of(const void* address) {
    Dl_info info;
    link_map* map = nullptr;
    return dladdr1(address, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) ? map : nullptr;
}

link_map* this_object() {
    static link_map* map = object_of(reinterpret_cast<const void*>(&object_of));
    return map;
}

bool is_library(const link_map* map, const char* name) {
    if (!map || !map->l_name) return false;
    const char* slash = std::strrchr(map->l_name, '/');
    return std::strncmp(slash ? slash + 1 : map->l_name, name, std::strlen(name)) == 0;
}

bool is_libcuda(const link_map* map) {
    return is_library(map, "libcuda.so");
}

bool load_from(link_map* library) {
    static std::mutex mutex;
    static bool loaded = false;
    const std::lock_guard lock(mutex);
    if (loaded) return true;
    dlopen(library->l_name,
           RTLD_LAZY | RTLD_NOLOAD);  // keeps it loaded while its addresses are known
    for (const HookTable table : {hooks(), known_names()})
        for (const Hook* hook = table.begin; hook != table.end; ++hook)
            __atomic_store_n(hook->real, real_dlsym()(library, hook->name), __ATOMIC_RELEASE);
    dlerror();  // clears the error of a missing function
    return loaded = true;
}

std::string without_version(std::string name) {
    for (const char* suffix : {"_ptsz", "_ptds"})
        if (name.size() > 5 && name.compare(name.size() - 5, 5, suffix) == 0)
            name.resize(name.size() - 5);
    const size_t at = name.rfind("_v");
    if (at != std::string::npos &&
        name.find_first_not_of("0123456789", at + 2) == std::string::npos)
        name.resize(at);
    return name;
}

// Returns whether a function of this name may submit work, as far as a name tells.
bool submits_work(const std::string& name) {
    const std::string base = without_version(name);
    const HookTable table = hooks();
    for (const Hook* hook = table.begin; hook != table.end; ++hook)
        if (!hook->asks && without_version(hook->name) == base) return true;
    if (base.compare(0, 7, "cuGraph") == 0)
        return base.find("Launch") != std::string::npos || base.find("Upload") != std::string::npos;
    for (const char* part :
         {"Launch", "Memcpy", "Memset", "Async", "MemOp", "WaitValue", "WriteValue", "Prefetch"})
        if (base.find(part) != std::string::npos) return true;
    return false;
}

// Returns the wrapper for what the real lookup of `name` found, or else what it found.
void* substitute(const char* name, void* found) {
    link_map* const library = object_of(found);
    if (!is_libcuda(library) || !load_from(library)) return found;
    for (const HookTable table : {hooks(), known_names()})
        for (const Hook* hook = table.begin; hook != table.end; ++hook)
            if (*hook->real == found) return hook->wrapper ? hook->wrapper : found;
    if (!submits_work(name)) return found;
    if (void* noticed = stand_in(name, found)) return noticed;
    mark_not_parkable(Reason::unknown_function, std::string("the program may call ") + name +
                                                    ", which this hook does not know");
    return found;
}

// Finds a definition in an object and its dependencies. Only an object that was opened itself can
// be searched: the loader keeps no list for those that it loaded as dependencies.
void* find_from(const link_map* map, const char* name) {
    void* const handle = dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return nullptr;
    void* const found = real_dlsym()(handle, name);
    dlclose(handle);
    return found;
}

// Finds the first definition in an object after the caller's, as RTLD_NEXT does.
void* find_next(const void* caller, const char* name) {
    const link_map* map = object_of(caller);
    for (map = map ? map->l_next : nullptr; map; map = map->l_next) {
        if (map == this_object()) continue;
        void* found = find_from(map, name);
        if (found && object_of(found) == map) return found;
    }
    return nullptr;
}

// Finds what the program would find without this library, which comes first in the global scope.
void* find_default(const void* caller, const char* name) {
    if (void* found = real_dlsym()(RTLD_NEXT, name)) return found;
    const link_map* map = object_of(caller);
    void* found = map ? find_from(map, name) : nullptr;
    return found && object_of(found) != this_object() ? found : nullptr;
}

// CUPTI is loaded with PyTorch, and asks for the driver's private tables when it is used first. The
// driver locks such a process no more, also when the profiler has ended (driver 580.159).
void note_profiler(const void* caller, const char* name) {
    if (std::strcmp(name, "cuGetExportTable") == 0 && is_library(object_of(caller), "libcupti.so"))
        mark_unsupported(Reason::cuda_tool,
                         "the program has used CUPTI, as profilers do (torch.profiler); the driver "
                         "saves it no more, also when it profiles no more");
}

__attribute__((noinline)) void* dlsym_driver(void* handle, const char* name) {
    const KeepErrno keep;
    const void* caller = __builtin_return_address(0);
    note_profiler(caller, name);
    void* found = nullptr;
    if (handle == RTLD_NEXT)
        found = find_next(caller, name);
    else if (handle != RTLD_DEFAULT)
        found = real_dlsym()(handle, name);
    if (handle == RTLD_DEFAULT || (found && object_of(found) == this_object()))
        found = find_default(caller, name);
    return found ? substitute(name, found) : nullptr;
}

}  // namespace

bool load_driver() {
    link_map* library = nullptr;
    if (void* handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD))
        library = static_cast<link_map*>(handle);
    return library && load_from(library);
}

// Names of libcuda, and only these, are "cu" and a capital; all others go to the real dlsym, which
// sees the original caller because `dlsym` below jumps.
extern "C" __attribute__((visibility("hidden"), used)) PHOS_NOT_SANITIZED Dlsym
phos_route_dlsym(void*, const char* name) {
    const bool ours = name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
    return ours && enabled() ? &dlsym_driver : real_dlsym();
}

asm(R"(
.text
.p2align 4
.globl dlsym
.type dlsym,@function
dlsym:
.cfi_startproc
endbr64
pushq %rdi
.cfi_adjust_cfa_offset 8
pushq %rsi
.cfi_adjust_cfa_offset 8
subq $8, %rsp
.cfi_adjust_cfa_offset 8
call phos_route_dlsym
addq $8, %rsp
.cfi_adjust_cfa_offset -8
popq %rsi
.cfi_adjust_cfa_offset -8
popq %rdi
.cfi_adjust_cfa_offset -8
jmp *%rax
.cfi_endproc
.size dlsym,.-dlsym
)");

CUresult overrides::cuGetProcAddress(const char* symbol, void** pfn, int version,
                                     cuuint64_t flags) {
    const CUresult result = driver.cuGetProcAddress(symbol, pfn, version, flags);
    if (result == CUDA_SUCCESS && enabled() && symbol && pfn && *pfn)
        *pfn = substitute(symbol, *pfn);
    return result;
}

CUresult overrides::cuGetProcAddress_v2(const char* symbol, void** pfn, int version,
                                        cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
    const CUresult result = driver.cuGetProcAddress_v2(symbol, pfn, version, flags, status);
    if (result == CUDA_SUCCESS && enabled() && symbol && pfn && *pfn)
        *pfn = substitute(symbol, *pfn);
    return result;
}

}  // namespace phos
