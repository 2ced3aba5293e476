// cuInit, versions, error texts and the lookup of functions.
#include <unordered_map>

#include "api/api.h"
#include "api/lookup.h"

using namespace phos::softgpu;

namespace {

constexpr int kVersion = 13000;

struct ErrorText {
    const char* name;
    const char* text;
};

const ErrorText& text_of(CUresult error) {
    static const auto& texts = *new std::unordered_map<int, ErrorText>{
#define ERROR(code, text) {code, {#code, text}},
#include "api/errors.def"
#undef ERROR
    };
    const auto found = texts.find(error);
    require(found != texts.end());
    return found->second;
}

Lookup look_up(const char* name, void** function, int version, cuuint64_t flags) {
    require(name != nullptr && function != nullptr && version <= kVersion);
    constexpr cuuint64_t known =
        CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    require((flags & ~known) == 0 && flags != known);
    const Lookup lookup = phos::softgpu::look_up(
        name, version, flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    *function = lookup.function;
    return lookup;
}

}  // namespace

ANYTIME_API(cuInit, (unsigned flags), (flags)) {
    require(flags == 0);
    initialize();
}

ANYTIME_API(cuDriverGetVersion, (int* version), (version)) {
    require(version != nullptr);
    *version = kVersion;
}

ANYTIME_API(cuGetErrorName, (CUresult error, const char** text), (error, text)) {
    require(text != nullptr);
    *text = nullptr;
    *text = text_of(error).name;
}

ANYTIME_API(cuGetErrorString, (CUresult error, const char** text), (error, text)) {
    require(text != nullptr);
    *text = nullptr;
    *text = text_of(error).text;
}

ANYTIME_API(cuGetExportTable, (const void** table, const CUuuid* id), (table, id)) {
    require(table != nullptr && id != nullptr);
    *table = nullptr;
    fail(CUDA_ERROR_NOT_FOUND);  // the real driver's private tables
}

ANYTIME_API(cuGetProcAddress, (const char* name, void** function, int version, cuuint64_t flags),
            (name, function, version, flags)) {
    require(look_up(name, function, version, flags).function, CUDA_ERROR_NOT_FOUND);
}

// With a place for the status, a function that is not there is no error.
ANYTIME_API(cuGetProcAddress_v2,
            (const char* name, void** function, int version, cuuint64_t flags,
             CUdriverProcAddressQueryResult* status),
            (name, function, version, flags, status)) {
    const Lookup lookup = look_up(name, function, version, flags);
    if (status)
        *status = lookup.function ? CU_GET_PROC_ADDRESS_SUCCESS
                  : lookup.known  ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                  : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    require(lookup.function || status, CUDA_ERROR_NOT_FOUND);
}
