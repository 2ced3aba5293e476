// An NVRTC for the software GPU, whose machine code is PTX: the compiler is NVIDIA's, named by
// PHOS_SOFTGPU_NVRTC, and what it gives out as a cubin is the PTX that it made. Everything else is
// passed on. A program loads it in place of libnvrtc.so.13 (docs/reference/softgpu.md).
#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <string>

namespace {

using Result = int;  // nvrtcResult
using Program = void*;
constexpr Result kSuccess = 0, kInternalError = 11;
constexpr char kMissing[] =
    "NVRTC is not to be found: set PHOS_SOFTGPU_NVRTC to the path of NVIDIA's libnvrtc.so.13";

void* open_compiler() {
    const char* path = std::getenv("PHOS_SOFTGPU_NVRTC");
    void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    void* version = library ? dlsym(library, "nvrtcVersion") : nullptr;
    int major = 0, minor = 0;
    if (!version || reinterpret_cast<Result (*)(int*, int*)>(version)(&major, &minor) != kSuccess)
        return nullptr;
    // It looks for this one by name alone, and finds it once it is loaded.
    const std::string folder(path, std::string(path).rfind('/') + 1);
    const std::string builtins =
        "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
    dlopen((folder + builtins).c_str(), RTLD_NOW | RTLD_GLOBAL);
    return library;
}

void* compiler() {
    static void* const library = open_compiler();
    return library;
}

template <typename R, typename... Arguments>
R pass_on(const char* name, R otherwise, Arguments... arguments) {
    void* found = compiler() ? dlsym(compiler(), name) : nullptr;
    return found ? reinterpret_cast<R (*)(Arguments...)>(found)(arguments...) : otherwise;
}

}  // namespace

#define NVRTC_API extern "C" __attribute__((visibility("default")))
#define PASS_ON(name, parameters, ...)                        \
    NVRTC_API Result name parameters {                        \
        return pass_on(#name, kInternalError, ##__VA_ARGS__); \
    }

NVRTC_API const char* nvrtcGetErrorString(Result result) {
    return pass_on("nvrtcGetErrorString", kMissing, result);
}

PASS_ON(nvrtcVersion, (int* major, int* minor), major, minor)
PASS_ON(nvrtcGetNumSupportedArchs, (int* count), count)
PASS_ON(nvrtcGetSupportedArchs, (int* archs), archs)
PASS_ON(nvrtcCreateProgram,
        (Program * program, const char* source, const char* name, int count,
         const char* const* headers, const char* const* names),
        program, source, name, count, headers, names)
PASS_ON(nvrtcDestroyProgram, (Program * program), program)
PASS_ON(nvrtcCompileProgram, (Program program, int count, const char* const* options), program,
        count, options)
PASS_ON(nvrtcGetPTXSize, (Program program, size_t* size), program, size)
PASS_ON(nvrtcGetPTX, (Program program, char* ptx), program, ptx)
PASS_ON(nvrtcGetLTOIRSize, (Program program, size_t* size), program, size)
PASS_ON(nvrtcGetLTOIR, (Program program, char* ir), program, ir)
PASS_ON(nvrtcGetOptiXIRSize, (Program program, size_t* size), program, size)
PASS_ON(nvrtcGetOptiXIR, (Program program, char* ir), program, ir)
PASS_ON(nvrtcGetProgramLogSize, (Program program, size_t* size), program, size)
PASS_ON(nvrtcGetProgramLog, (Program program, char* log), program, log)
PASS_ON(nvrtcAddNameExpression, (Program program, const char* expression), program, expression)
PASS_ON(nvrtcGetLoweredName, (Program program, const char* expression, const char** lowered),
        program, expression, lowered)
PASS_ON(nvrtcGetPCHHeapSize, (size_t* size), size)
PASS_ON(nvrtcSetPCHHeapSize, (size_t size), size)
PASS_ON(nvrtcGetPCHCreateStatus, (Program program), program)
PASS_ON(nvrtcGetPCHHeapSizeRequired, (Program program, size_t* size), program, size)
PASS_ON(nvrtcSetFlowCallback, (Program program, int (*callback)(void*, void*), void* data), program,
        callback, data)

// As NVIDIA's, 0 for a program that was compiled for no real architecture.
NVRTC_API Result nvrtcGetCUBINSize(Program program, size_t* size) {
    const Result result = pass_on("nvrtcGetCUBINSize", kInternalError, program, size);
    return result == kSuccess && *size ? nvrtcGetPTXSize(program, size) : result;
}
NVRTC_API Result nvrtcGetCUBIN(Program program, char* cubin) {
    size_t size = 0;
    const Result result = nvrtcGetCUBINSize(program, &size);
    if (result != kSuccess) return result;
    return size ? nvrtcGetPTX(program, cubin)
                : pass_on("nvrtcGetCUBIN", kInternalError, program, cubin);
}
