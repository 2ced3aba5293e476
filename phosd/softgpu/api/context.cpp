// Contexts: primary and created, the thread's stack of them, limits and flags.
#include "api/api.h"
#include "core/submit.h"

using namespace phos::softgpu;

namespace {

constexpr unsigned kContextFlags = CU_CTX_FLAGS_MASK;

CUcontext handle_of(const ContextPtr& context) {
    return reinterpret_cast<CUcontext>(context.get());
}

ContextPtr context_of(CUcontext handle) {
    return handle ? runtime().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT) : current();
}

void set_current(ContextPtr context) {
    auto& stack = this_thread().stack;
    if (!stack.empty()) stack.pop_back();
    if (context) stack.push_back(std::move(context));
}

void end_primary(Device& device) {
    if (!device.primary) return;
    const ContextPtr context = std::exchange(device.primary, nullptr);
    runtime().contexts.remove(handle_of(context));
    runtime().destroy(context);
}

void retain_primary(CUcontext* handle, CUdevice ordinal) {
    require(handle != nullptr);
    Device& device = runtime().device(ordinal);
    std::lock_guard lock(device.mutex);
    if (!device.primary) {
        device.primary = std::make_shared<Context>(ordinal, device.primary_flags, true);
        runtime().contexts.add(device.primary);
    }
    ++device.primary_count;
    *handle = handle_of(device.primary);
}

void release_primary(CUdevice ordinal) {
    Device& device = runtime().device(ordinal);
    std::lock_guard lock(device.mutex);
    require(device.primary_count > 0, CUDA_ERROR_INVALID_CONTEXT);
    if (--device.primary_count == 0) end_primary(device);
}

// Whoever retained the context must retain it anew.
void reset_primary(CUdevice ordinal) {
    Device& device = runtime().device(ordinal);
    std::lock_guard lock(device.mutex);
    if (!device.primary) return;
    end_primary(device);
    device.primary_count = 0;
}

void set_primary_flags(CUdevice ordinal, unsigned flags) {
    require((flags & ~kContextFlags) == 0);
    Device& device = runtime().device(ordinal);
    std::lock_guard lock(device.mutex);
    device.primary_flags = flags;
    if (device.primary) device.primary->flags = flags;
}

void create(CUcontext* handle, unsigned flags, CUdevice ordinal) {
    require(handle != nullptr && (flags & ~kContextFlags) == 0);
    runtime().device(ordinal);
    auto context = std::make_shared<Context>(ordinal, flags, false);
    *handle = runtime().contexts.add(context);
    this_thread().stack.push_back(std::move(context));
}

void destroy(CUcontext handle) {
    const ContextPtr context = runtime().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT);
    require(!context->primary, CUDA_ERROR_INVALID_CONTEXT);
    runtime().contexts.remove(handle, CUDA_ERROR_INVALID_CONTEXT);
    auto& stack = this_thread().stack;
    if (!stack.empty() && stack.back() == context) stack.pop_back();
    runtime().destroy(context);
}

void push(CUcontext handle) {
    this_thread().stack.push_back(runtime().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT));
}

void pop(CUcontext* handle) {
    auto& stack = this_thread().stack;
    require(!stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
    if (handle) *handle = handle_of(stack.back());
    stack.pop_back();
}

size_t& limit_of(Context& context, CUlimit limit) {
    const auto found = context.limits.find(limit);
    require(found != context.limits.end(),
            limit < CU_LIMIT_MAX ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_ERROR_INVALID_VALUE);
    return found->second;
}

}  // namespace

API(cuDevicePrimaryCtxRetain, (CUcontext * handle, CUdevice device), (handle, device)) {
    retain_primary(handle, device);
}
API(cuDevicePrimaryCtxRelease, (CUdevice device), (device)) {
    release_primary(device);
}
API(cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device)) {
    release_primary(device);
}
API(cuDevicePrimaryCtxReset, (CUdevice device), (device)) {
    reset_primary(device);
}
API(cuDevicePrimaryCtxReset_v2, (CUdevice device), (device)) {
    reset_primary(device);
}
API(cuDevicePrimaryCtxSetFlags, (CUdevice device, unsigned flags), (device, flags)) {
    set_primary_flags(device, flags);
}
API(cuDevicePrimaryCtxSetFlags_v2, (CUdevice device, unsigned flags), (device, flags)) {
    set_primary_flags(device, flags);
}
API(cuDevicePrimaryCtxGetState, (CUdevice ordinal, unsigned* flags, int* active),
    (ordinal, flags, active)) {
    require(flags != nullptr && active != nullptr);
    Device& device = runtime().device(ordinal);
    std::lock_guard lock(device.mutex);
    *flags = device.primary ? device.primary->flags.load() : device.primary_flags;
    *active = device.primary != nullptr;
}

API(cuCtxCreate_v2, (CUcontext * handle, unsigned flags, CUdevice device),
    (handle, flags, device)) {
    create(handle, flags, device);
}
API(cuCtxCreate_v4,
    (CUcontext * handle, CUctxCreateParams* parameters, unsigned flags, CUdevice device),
    (handle, parameters, flags, device)) {
    require(!parameters || (!parameters->numExecAffinityParams && !parameters->cigParams),
            CUDA_ERROR_NOT_SUPPORTED);
    create(handle, flags, device);
}
API(cuCtxDestroy_v2, (CUcontext handle), (handle)) {
    destroy(handle);
}
API(cuCtxPushCurrent_v2, (CUcontext handle), (handle)) {
    push(handle);
}
API(cuCtxPopCurrent_v2, (CUcontext * handle), (handle)) {
    pop(handle);
}

API(cuCtxSetCurrent, (CUcontext handle), (handle)) {
    set_current(handle ? runtime().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT) : nullptr);
}

API(cuCtxGetCurrent, (CUcontext * handle), (handle)) {
    require(handle != nullptr);
    const auto& stack = this_thread().stack;
    *handle = stack.empty() ? nullptr : handle_of(stack.back());
}

API(cuCtxGetDevice, (CUdevice * device), (device)) {
    require(device != nullptr);
    *device = current_even_broken()->device;
}
API(cuCtxGetDevice_v2, (CUdevice * device, CUcontext handle), (device, handle)) {
    require(device != nullptr);
    *device = context_of(handle)->device;
}

API(cuCtxGetFlags, (unsigned* flags), (flags)) {
    require(flags != nullptr);
    *flags = current()->flags;
}
API(cuCtxSetFlags, (unsigned flags), (flags)) {
    require((flags & ~kContextFlags) == 0);
    current()->flags = flags;
}

API(cuCtxGetId, (CUcontext handle, unsigned long long* id), (handle, id)) {
    require(id != nullptr);
    *id = context_of(handle)->id;
}

API(cuCtxGetApiVersion, (CUcontext handle, unsigned* version), (handle, version)) {
    require(version != nullptr);
    context_of(handle);
    *version = 3020;
}

API(cuCtxSynchronize, (), ()) {
    const ContextPtr context = current();
    forbid_during_capture();
    forbid_during_capture_in(*context);
    context->synchronize();
}
API(cuCtxSynchronize_v2, (CUcontext handle), (handle)) {
    const ContextPtr context = context_of(handle);
    forbid_during_capture();
    forbid_during_capture_in(*context);
    context->synchronize();
}

API(cuCtxSetLimit, (CUlimit limit, size_t value), (limit, value)) {
    limit_of(*current(), limit) = value;
}
API(cuCtxGetLimit, (size_t* value, CUlimit limit), (value, limit)) {
    require(value != nullptr);
    *value = limit_of(*current(), limit);
}

API(cuCtxGetCacheConfig, (CUfunc_cache * config), (config)) {
    require(config != nullptr);
    *config = current()->cache_config;
}
API(cuCtxSetCacheConfig, (CUfunc_cache config), (config)) {
    current()->cache_config = config;
}
API(cuCtxGetSharedMemConfig, (CUsharedconfig * config), (config)) {
    require(config != nullptr);
    *config = current()->shared_config;
}
API(cuCtxSetSharedMemConfig, (CUsharedconfig config), (config)) {
    current()->shared_config = config;
}

API(cuCtxGetStreamPriorityRange, (int* least, int* greatest), (least, greatest)) {
    current();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
}

API(cuCtxResetPersistingL2Cache, (), ()) {
    current();
}

API(cuCtxGetExecAffinity, (CUexecAffinityParam * parameter, CUexecAffinityType type),
    (parameter, type)) {
    require(parameter != nullptr);
    current();
    (void)type;
    fail(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
}

API(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags)) {
    require(flags == 0);
    const ContextPtr context = current();
    const ContextPtr other = runtime().contexts.get(peer, CUDA_ERROR_INVALID_CONTEXT);
    require(context->device != other->device, CUDA_ERROR_INVALID_DEVICE);
    require(runtime().config().peers, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    std::lock_guard lock(runtime().peers_mutex);
    bool& open =
        runtime().peers[static_cast<size_t>(context->device)][static_cast<size_t>(other->device)];
    require(!open, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    runtime()
        .device(other->device)
        .heap.set_access(static_cast<unsigned>(context->device), true, true);
    open = true;
}
API(cuCtxDisablePeerAccess, (CUcontext peer), (peer)) {
    const ContextPtr context = current();
    const ContextPtr other = runtime().contexts.get(peer, CUDA_ERROR_INVALID_CONTEXT);
    std::lock_guard lock(runtime().peers_mutex);
    bool& open =
        runtime().peers[static_cast<size_t>(context->device)][static_cast<size_t>(other->device)];
    require(open, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    runtime()
        .device(other->device)
        .heap.set_access(static_cast<unsigned>(context->device), false, false);
    open = false;
}
