// Streams: making, waiting, host functions, waits for and writes of values.
#include <algorithm>

#include "api/api.h"
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

WorkPtr value_wait(CUdeviceptr address, uint64_t value, unsigned bytes, unsigned flags) {
    require((flags & ~(3u | CU_STREAM_WAIT_VALUE_FLUSH)) == 0);
    check_address(address, bytes);
    return std::make_shared<ValueWait>(address, value, bytes, flags);
}

WorkPtr value_write(CUdeviceptr address, uint64_t value, unsigned bytes, unsigned flags) {
    require((flags & ~unsigned{CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER}) == 0);
    check_address(address, bytes);
    return std::make_shared<ValueWrite>(address, value, bytes);
}

}  // namespace

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

STREAM_API(cuStreamQuery, (CUstream stream), (stream)) {
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
    submit(stream_of(stream), value_wait(address, value, 4, flags));
}
STREAM_API(cuStreamWaitValue64_v2,
           (CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags),
           (stream, address, value, flags)) {
    submit(stream_of(stream), value_wait(address, value, 8, flags));
}
STREAM_API(cuStreamWriteValue32_v2,
           (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags),
           (stream, address, value, flags)) {
    submit(stream_of(stream), value_write(address, value, 4, flags));
}
STREAM_API(cuStreamWriteValue64_v2,
           (CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags),
           (stream, address, value, flags)) {
    submit(stream_of(stream), value_write(address, value, 8, flags));
}

STREAM_API(cuStreamBatchMemOp_v2,
           (CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags),
           (stream, count, operations, flags)) {
    require(operations != nullptr && count > 0 && count <= 256 && flags == 0);
    const StreamPtr of = stream_of(stream);
    std::vector<WorkPtr> works;  // all are checked before the first is submitted
    for (unsigned i = 0; i < count; ++i) {
        const CUstreamBatchMemOpParams& op = operations[i];
        switch (op.operation) {
            case CU_STREAM_MEM_OP_WAIT_VALUE_32:
                works.push_back(
                    value_wait(op.waitValue.address, op.waitValue.value, 4, op.waitValue.flags));
                break;
            case CU_STREAM_MEM_OP_WAIT_VALUE_64:
                works.push_back(
                    value_wait(op.waitValue.address, op.waitValue.value64, 8, op.waitValue.flags));
                break;
            case CU_STREAM_MEM_OP_WRITE_VALUE_32:
                works.push_back(value_write(op.writeValue.address, op.writeValue.value, 4,
                                            op.writeValue.flags));
                break;
            case CU_STREAM_MEM_OP_WRITE_VALUE_64:
                works.push_back(value_write(op.writeValue.address, op.writeValue.value64, 8,
                                            op.writeValue.flags));
                break;
            case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
            case CU_STREAM_MEM_OP_BARRIER:
                works.push_back(std::make_shared<Nothing>());  // a stream's work is in order
                break;
            default:
                fail(CUDA_ERROR_INVALID_VALUE);
        }
    }
    for (WorkPtr& work : works) submit(of, std::move(work));
}
