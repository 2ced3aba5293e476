// Streams: making, waiting, host functions, waits for and writes of values.
#include <algorithm>

#include "api/api.h"
#include "api/works.h"
#include "core/submit.h"
#include "core/work.h"

using namespace phos::softgpu;

namespace {

constexpr int kGreatestPriority = -5;

void create(CUstream* handle, unsigned flags, int priority) {
    require(handle != nullptr && (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) == 0);
    const ContextPtr context = current();
    priority = std::clamp(priority, kGreatestPriority, 0);
    *handle = runtime().streams.add(context->create_stream(Stream::Kind::created, flags, priority));
}

void destroy(CUstream handle) {
    const StreamPtr stream = runtime().streams.remove(handle);
    stream->context.remove_stream(stream);
}

void check_address(CUdeviceptr address, unsigned bytes) {
    require(address % bytes == 0);
    require(Space::inside(address) ? runtime().space().reserved(address)
                                   : runtime().host.find(address).size > 0);
}

void check(const CUstreamBatchMemOpParams& operation) {
    const auto& wait = operation.waitValue;
    const auto& write = operation.writeValue;
    const bool wide = operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 ||
                      operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
    switch (operation.operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
            require((wait.flags & ~(3u | CU_STREAM_WAIT_VALUE_FLUSH)) == 0);
            return check_address(wait.address, wide ? 8 : 4);
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            require((write.flags & ~unsigned{CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER}) == 0);
            return check_address(write.address, wide ? 8 : 4);
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        case CU_STREAM_MEM_OP_BARRIER:
            return;
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

void submit_value(CUstream stream, CUstreamBatchMemOpType type, CUdeviceptr address, uint64_t value,
                  unsigned flags) {
    CUstreamBatchMemOpParams operation{};
    // Waits and writes have their fields at the same places, and a narrow value is the low half.
    operation.waitValue = {type, address, {}, flags, 0};
    operation.waitValue.value64 = value;
    submit(stream_of(stream), value_operations(&operation, 1, 0));
}

}  // namespace

namespace phos::softgpu {

std::shared_ptr<const ValueOperations> value_operations(const CUstreamBatchMemOpParams* operations,
                                                        unsigned count, unsigned flags) {
    require(operations != nullptr && count > 0 && count <= 256 && flags == 0);
    std::for_each(operations, operations + count, check);
    return std::make_shared<ValueOperations>(
        std::vector<CUstreamBatchMemOpParams>(operations, operations + count));
}

}  // namespace phos::softgpu

API(cuStreamCreate, (CUstream * handle, unsigned flags), (handle, flags)) {
    create(handle, flags, 0);
}
API(cuStreamCreateWithPriority, (CUstream * handle, unsigned flags, int priority),
    (handle, flags, priority)) {
    create(handle, flags, priority);
}
API(cuStreamDestroy_v2, (CUstream handle), (handle)) {
    destroy(handle);
}

STREAM_API(cuStreamGetPriority, (CUstream stream, int* priority), (stream, priority)) {
    require(priority != nullptr);
    *priority = stream_of(stream)->priority;
}
STREAM_API(cuStreamGetFlags, (CUstream stream, unsigned* flags), (stream, flags)) {
    require(flags != nullptr);
    *flags = stream_of(stream)->flags;
}
STREAM_API(cuStreamGetId, (CUstream stream, unsigned long long* id), (stream, id)) {
    require(id != nullptr);
    *id = stream_of(stream)->id;
}
STREAM_API(cuStreamGetDevice, (CUstream stream, CUdevice* device), (stream, device)) {
    require(device != nullptr);
    *device = stream_of(stream)->context.device;
}
STREAM_API(cuStreamGetCtx, (CUstream stream, CUcontext* context), (stream, context)) {
    require(context != nullptr);
    *context = reinterpret_cast<CUcontext>(&stream_of(stream)->context);
}
STREAM_API(cuStreamGetCtx_v2, (CUstream stream, CUcontext* context, CUgreenCtx* green),
           (stream, context, green)) {
    require(context != nullptr && green != nullptr);
    *context = reinterpret_cast<CUcontext>(&stream_of(stream)->context);
    *green = nullptr;
}

POLLING_STREAM_API(cuStreamQuery, (CUstream stream), (stream)) {
    const StreamPtr of = stream_of(stream);
    forbid_capturing(of);
    forbid_during_capture();
    require(of->context.idle(*of), CUDA_ERROR_NOT_READY);
}

STREAM_API(cuStreamSynchronize, (CUstream stream), (stream)) {
    const StreamPtr of = stream_of(stream);
    forbid_capturing(of);
    forbid_during_capture();
    of->context.synchronize(*of);
}

STREAM_API(cuStreamAddCallback,
           (CUstream stream, CUstreamCallback callback, void* data, unsigned flags),
           (stream, callback, data, flags)) {
    require(callback != nullptr && flags == 0);
    const StreamPtr of = stream_of(stream);
    forbid_capturing(of);
    submit(of, std::make_shared<StreamCallback>(callback, stream, data));
}

STREAM_API(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void* data),
           (stream, function, data)) {
    require(function != nullptr);
    submit(stream_of(stream), std::make_shared<HostCall>(function, data));
}

STREAM_API(cuStreamAttachMemAsync,
           (CUstream stream, CUdeviceptr address, size_t length, unsigned flags),
           (stream, address, length, flags)) {
    (void)length;
    require(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST ||
            flags == CU_MEM_ATTACH_SINGLE);
    const HostRange range = runtime().host.find(address);
    require(range.size && range.kind == HostRange::Kind::managed);
    stream_of(stream);  // every device and the host reach managed memory at all times
}

STREAM_API(cuStreamWaitValue32_v2,
           (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags),
           (stream, address, value, flags)) {
    submit_value(stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, flags);
}
STREAM_API(cuStreamWaitValue64_v2,
           (CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags),
           (stream, address, value, flags)) {
    submit_value(stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags);
}
STREAM_API(cuStreamWriteValue32_v2,
           (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags),
           (stream, address, value, flags)) {
    submit_value(stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, flags);
}
STREAM_API(cuStreamWriteValue64_v2,
           (CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags),
           (stream, address, value, flags)) {
    submit_value(stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags);
}
STREAM_API(cuStreamBatchMemOp_v2,
           (CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags),
           (stream, count, operations, flags)) {
    submit(stream_of(stream), value_operations(operations, count, flags));
}
