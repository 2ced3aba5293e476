// How a driver function is written: its body is void and throws Error; the exported function
// checks that calls are possible at all, passes the gate, and turns an Error into its code.
#pragma once

#include <cuda.h>

#include <cstring>
#include <new>

#include "core/error.h"
#include "core/runtime.h"

namespace phos::softgpu {

template <typename Body>
CUresult call_anytime(Body body) noexcept {
    try {
        body();
        return CUDA_SUCCESS;
    } catch (const Error& error) {
        return error.code;
    } catch (const std::bad_alloc&) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
}

inline void require_usable() {
    require(initialized() && !forked(), CUDA_ERROR_NOT_INITIALIZED);
    require(!this_thread().in_callback, CUDA_ERROR_NOT_PERMITTED);
}

// As the driver's polling calls: not kept out of a locked process, and the end of one that has been
// checkpointed.
template <typename Body>
CUresult poll(Body body) noexcept {
    return call_anytime([&] {
        require_usable();
        runtime().space().poll();
        body();
    });
}

template <typename Body>
CUresult call(Body body) noexcept {
    return call_anytime([&] {
        require_usable();
        struct Inside {
            Inside() { runtime().gate().enter(); }
            ~Inside() { runtime().gate().leave(); }
        } inside;
        body();
    });
}

inline CUstream per_thread(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

}  // namespace phos::softgpu

#define DRIVER_API extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI

#define API_BY(caller, name, parameters, arguments)                   \
    static void body_##name parameters;                               \
    DRIVER_API name parameters {                                      \
        return phos::softgpu::caller([&] { body_##name arguments; }); \
    }                                                                 \
    static void body_##name parameters

// API(name, (parameters), (their names)) { body }
#define API(name, parameters, arguments) API_BY(call, name, parameters, arguments)
// A function that works before cuInit and while the process is locked.
#define ANYTIME_API(name, parameters, arguments) API_BY(call_anytime, name, parameters, arguments)
#define POLLING_API(name, parameters, arguments) API_BY(poll, name, parameters, arguments)

#define STREAM_API_BY(caller, name, parameters, arguments)            \
    static void body_##name parameters;                               \
    DRIVER_API name parameters {                                      \
        return phos::softgpu::caller([&] { body_##name arguments; }); \
    }                                                                 \
    DRIVER_API name##_ptsz parameters {                               \
        stream = phos::softgpu::per_thread(stream);                   \
        return phos::softgpu::caller([&] { body_##name arguments; }); \
    }                                                                 \
    static void body_##name parameters

// A function whose last parameter is `CUstream stream`, and its _ptsz variant, for which stream 0
// is the calling thread's own default stream.
#define STREAM_API(name, parameters, arguments) STREAM_API_BY(call, name, parameters, arguments)
#define POLLING_STREAM_API(name, parameters, arguments) \
    STREAM_API_BY(poll, name, parameters, arguments)

// A function that works in a default stream without naming it, and its _ptds variant. The body
// has `CUstream stream` as its first parameter.
#define STRIP_(...) __VA_ARGS__
#define DEFAULT_STREAM_API(name, parameters, arguments)                                           \
    static void body_##name(CUstream stream, STRIP_ parameters);                                  \
    DRIVER_API name parameters {                                                                  \
        return phos::softgpu::call([&] { body_##name(CU_STREAM_LEGACY, STRIP_ arguments); });     \
    }                                                                                             \
    DRIVER_API name##_ptds parameters {                                                           \
        return phos::softgpu::call([&] { body_##name(CU_STREAM_PER_THREAD, STRIP_ arguments); }); \
    }                                                                                             \
    static void body_##name([[maybe_unused]] CUstream stream, STRIP_ parameters)
