// Copies and fills of one dimension and of rows.
#include <set>

#include "api/api.h"
#include "api/works.h"
#include "core/submit.h"
#include "core/work.h"

using namespace phos::softgpu;

namespace {

constexpr size_t kSnapshot = 1 << 20;  // a pageable source up to this size is copied away at once

enum class Wait { no, yes };

End device_end(CUdeviceptr address, size_t pitch = 0, size_t height = 0) {
    const Space& space = runtime().space();
    require(Space::inside(address) ? space.reserved(address) && !space.host_only(address)
                                   : runtime().host.find(address).size > 0);
    return {address, true, pitch, height};
}

End any_end(CUdeviceptr address, size_t pitch = 0, size_t height = 0) {
    if (Space::inside(address) ? !runtime().space().host_only(address)
                               : runtime().host.find(address).size > 0)
        return device_end(address, pitch, height);
    require(address != 0);
    return {address, false, pitch, height};
}

End host_end(const void* address, size_t pitch = 0, size_t height = 0) {
    return any_end(reinterpret_cast<uint64_t>(address), pitch, height);
}

bool in_host(const End& end) {
    return !Space::inside(end.address) || runtime().space().find(end.address).host;
}

std::shared_ptr<const Copy> linear(End to, End from, size_t bytes) {
    return std::make_shared<Copy>(to, from, bytes);
}

bool nothing_in(const Copy& what) {
    return what.width() == 0 || what.rows() == 0 || what.slices() == 0;
}

bool touches_host(const Copy& what) {
    return in_host(what.to()) || in_host(what.from());
}

// A synchronous call returns when the host's side is done; between devices it only orders.
// An asynchronous one that reads or writes pageable memory is done with it when it returns.
void copy(CUstream handle, Wait wait, std::shared_ptr<const Copy> what) {
    const StreamPtr stream = stream_of(handle);
    if (wait == Wait::yes && touches_host(*what)) forbid_during_capture();
    if (nothing_in(*what)) return;
    const bool pageable_source = !what->from().device, pageable_target = !what->to().device;
    bool for_the_end = wait == Wait::yes ? touches_host(*what) : pageable_source || pageable_target;
    if (wait == Wait::no && pageable_source && what->rows() * what->slices() == 1 &&
        what->width() <= kSnapshot && !captures(stream)) {
        const auto* bytes = reinterpret_cast<const std::byte*>(what->from().address);
        what = std::make_shared<Copy>(what->to(),
                                      std::vector<std::byte>(bytes, bytes + what->width()));
        for_the_end = pageable_target;
    }
    std::unique_lock<std::recursive_mutex> alone;
    if (wait == Wait::yes && for_the_end) alone = stream->context.keep_submissions_out();
    const Mark mark = submit(stream, std::move(what));
    if (!for_the_end) return;
    mark.wait();
    stream->context.check();
}

using Copies = std::vector<std::shared_ptr<const Copy>>;

bool reads_during_call(CUmemcpySrcAccessOrder order) {
    require(order >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && order <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
    return order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
}

// All of a batch has been looked at before its first copy runs. They may run in any order; here
// they run in theirs.
void submit_batch(CUstream handle, Copies copies, bool during_call) {
    require(handle != nullptr && handle != CU_STREAM_LEGACY);
    const StreamPtr stream = stream_of(handle);
    forbid_capturing(stream);
    for (auto& what : copies) copy(handle, Wait::no, std::move(what));
    // The stream has then read what may be gone when the call returns.
    if (during_call) stream->tail().wait();
}

// attributes[i] holds from the copy number starts[i] on.
void copy_batch(CUstream handle, const CUdeviceptr* to, const CUdeviceptr* from,
                const size_t* sizes, size_t count, const CUmemcpyAttributes* attributes,
                const size_t* starts, size_t kinds) {
    require(to && from && sizes && attributes && starts && count > 0);
    require(kinds > 0 && kinds <= count && starts[0] == 0);
    bool during_call = false;
    for (size_t kind = 0; kind < kinds; ++kind) {
        during_call |= reads_during_call(attributes[kind].srcAccessOrder);
        const size_t end = kind + 1 < kinds ? starts[kind + 1] : count;
        require(starts[kind] < end && end <= count);
    }
    Copies copies;
    for (size_t i = 0; i < count; ++i) {
        require(sizes[i] > 0);
        copies.push_back(linear(any_end(to[i]), any_end(from[i]), sizes[i]));
    }
    submit_batch(handle, std::move(copies), during_call);
}

// One side of a copy in a batch of three dimensions. Lengths are bytes; arrays are not there.
End end_of(const CUmemcpy3DOperand& operand, const CUextent3D& extent) {
    require(operand.type != CU_MEMCPY_OPERAND_TYPE_ARRAY, CUDA_ERROR_NOT_SUPPORTED);
    require(operand.type == CU_MEMCPY_OPERAND_TYPE_POINTER);
    const auto& at = operand.op.ptr;
    require(at.rowLength == 0 || at.rowLength >= extent.width);
    require(at.layerHeight == 0 || at.layerHeight >= extent.height);
    return any_end(at.ptr, at.rowLength ? at.rowLength : extent.width,
                   at.layerHeight ? at.layerHeight : extent.height);
}

void copy_batch(CUstream handle, const CUDA_MEMCPY3D_BATCH_OP* operations, size_t count,
                unsigned long long flags) {
    require(operations && count > 0 && flags == 0);
    bool during_call = false;
    Copies copies;
    for (size_t i = 0; i < count; ++i) {
        const CUextent3D& extent = operations[i].extent;
        require(extent.width > 0 && extent.height > 0 && extent.depth > 0);
        during_call |= reads_during_call(operations[i].srcAccessOrder);
        copies.push_back(std::make_shared<Copy>(end_of(operations[i].dst, extent),
                                                end_of(operations[i].src, extent), extent.width,
                                                extent.height, extent.depth));
    }
    submit_batch(handle, std::move(copies), during_call);
}

// Serialized with all work of the contexts and of the current one, before and after it.
void copy_between(CUstream handle, std::set<ContextPtr> contexts,
                  std::shared_ptr<const Copy> what) {
    const StreamPtr stream = stream_of(handle);
    forbid_during_capture();
    forbid_capturing(stream);
    if (nothing_in(*what)) return;
    contexts.insert(stream->context.shared_from_this());
    const bool for_the_end = touches_host(*what);
    const Mark mark = submit_alone(stream, std::move(what), contexts);
    if (!for_the_end) return;
    mark.wait();
    stream->context.check();
}

ContextPtr context_of(CUcontext handle) {
    return runtime().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT);
}

// A synchronous call returns when it is done if the memory is the host's, else at once.
void fill(CUstream handle, Wait wait, CUdeviceptr address, uint32_t value, unsigned element,
          size_t width, size_t rows = 1, size_t pitch = 0) {
    const StreamPtr stream = stream_of(handle);
    if (width == 0 || rows == 0) return;
    require(address % element == 0 && (rows == 1 || pitch >= width * element));
    const End to = device_end(address);
    const bool for_the_end = wait == Wait::yes && in_host(to);
    if (for_the_end) forbid_during_capture();
    const Mark mark =
        submit(stream, std::make_shared<Fill>(address, value, element, width, rows, pitch));
    if (!for_the_end) return;
    mark.wait();
    stream->context.check();
}

// One side of a described copy. Arrays are not there.
End end_of(CUmemorytype type, const void* host, CUdeviceptr device, size_t x, size_t y, size_t z,
           size_t pitch, size_t height) {
    const size_t offset = (z * height + y) * pitch + x;
    switch (type) {
        case CU_MEMORYTYPE_HOST: {
            End end = host_end(static_cast<const char*>(host) + offset, pitch, height);
            return end;
        }
        case CU_MEMORYTYPE_DEVICE:
            return device_end(device + offset, pitch, height);
        case CU_MEMORYTYPE_UNIFIED:
            return any_end(device + offset, pitch, height);
        case CU_MEMORYTYPE_ARRAY:
            fail(CUDA_ERROR_NOT_SUPPORTED);
        default:
            fail(CUDA_ERROR_INVALID_VALUE);
    }
}

std::shared_ptr<const Copy> described(const CUDA_MEMCPY2D* what) {
    require(what != nullptr);
    const auto& c = *what;
    const size_t from_pitch = c.srcPitch ? c.srcPitch : c.WidthInBytes + c.srcXInBytes;
    const size_t to_pitch = c.dstPitch ? c.dstPitch : c.WidthInBytes + c.dstXInBytes;
    require(from_pitch >= c.WidthInBytes && to_pitch >= c.WidthInBytes);
    return std::make_shared<Copy>(
        end_of(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstXInBytes, c.dstY, 0, to_pitch, 0),
        end_of(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcXInBytes, c.srcY, 0, from_pitch, 0),
        c.WidthInBytes, c.Height);
}

// CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER name their fields alike.
template <typename Description>
std::shared_ptr<const Copy> described(const Description* what) {
    require(what != nullptr);
    const auto& c = *what;
    const size_t from_pitch = c.srcPitch ? c.srcPitch : c.WidthInBytes + c.srcXInBytes;
    const size_t to_pitch = c.dstPitch ? c.dstPitch : c.WidthInBytes + c.dstXInBytes;
    const size_t from_height = c.srcHeight ? c.srcHeight : c.Height + c.srcY;
    const size_t to_height = c.dstHeight ? c.dstHeight : c.Height + c.dstY;
    require(from_pitch >= c.WidthInBytes && to_pitch >= c.WidthInBytes && from_height >= c.Height &&
            to_height >= c.Height);
    return std::make_shared<Copy>(end_of(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstXInBytes,
                                         c.dstY, c.dstZ, to_pitch, to_height),
                                  end_of(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcXInBytes,
                                         c.srcY, c.srcZ, from_pitch, from_height),
                                  c.WidthInBytes, c.Height, c.Depth);
}

// A side in host memory belongs to no context.
std::set<ContextPtr> contexts_of(const CUDA_MEMCPY3D_PEER& what) {
    std::set<ContextPtr> contexts;
    if (what.dstMemoryType != CU_MEMORYTYPE_HOST) contexts.insert(context_of(what.dstContext));
    if (what.srcMemoryType != CU_MEMORYTYPE_HOST) contexts.insert(context_of(what.srcContext));
    return contexts;
}

}  // namespace

namespace phos::softgpu {

std::shared_ptr<const Copy> copy_of(const CUDA_MEMCPY3D& what) {
    auto copy = described(&what);
    require(!nothing_in(*copy));
    return copy;
}

std::shared_ptr<const Fill> fill_of(const CUDA_MEMSET_NODE_PARAMS& what) {
    require(what.elementSize == 1 || what.elementSize == 2 || what.elementSize == 4);
    require(what.width > 0 && what.height > 0 && what.dst % what.elementSize == 0);
    device_end(what.dst);
    return std::make_shared<Fill>(what.dst, what.value, what.elementSize, what.width, what.height,
                                  what.pitch);
}

}  // namespace phos::softgpu

DEFAULT_STREAM_API(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes)) {
    copy(stream, Wait::yes, linear(any_end(to), any_end(from), bytes));
}
DEFAULT_STREAM_API(cuMemcpyHtoD_v2, (CUdeviceptr to, const void* from, size_t bytes),
                   (to, from, bytes)) {
    copy(stream, Wait::yes, linear(device_end(to), host_end(from), bytes));
}
DEFAULT_STREAM_API(cuMemcpyDtoH_v2, (void* to, CUdeviceptr from, size_t bytes), (to, from, bytes)) {
    copy(stream, Wait::yes, linear(host_end(to), device_end(from), bytes));
}
DEFAULT_STREAM_API(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
                   (to, from, bytes)) {
    copy(stream, Wait::yes, linear(device_end(to), device_end(from), bytes));
}
DEFAULT_STREAM_API(cuMemcpyPeer,
                   (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                    size_t bytes),
                   (to, to_context, from, from_context, bytes)) {
    copy_between(stream, {context_of(to_context), context_of(from_context)},
                 linear(device_end(to), device_end(from), bytes));
}
DEFAULT_STREAM_API(cuMemcpy2D_v2, (const CUDA_MEMCPY2D* what), (what)) {
    copy(stream, Wait::yes, described(what));
}
DEFAULT_STREAM_API(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D* what), (what)) {
    copy(stream, Wait::yes, described(what));
}
DEFAULT_STREAM_API(cuMemcpy3D_v2, (const CUDA_MEMCPY3D* what), (what)) {
    copy(stream, Wait::yes, described(what));
}
DEFAULT_STREAM_API(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER* what), (what)) {
    const auto copy = described(what);
    copy_between(stream, contexts_of(*what), copy);
}

STREAM_API(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
           (to, from, bytes, stream)) {
    copy(stream, Wait::no, linear(any_end(to), any_end(from), bytes));
}
STREAM_API(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void* from, size_t bytes, CUstream stream),
           (to, from, bytes, stream)) {
    copy(stream, Wait::no, linear(device_end(to), host_end(from), bytes));
}
STREAM_API(cuMemcpyDtoHAsync_v2, (void* to, CUdeviceptr from, size_t bytes, CUstream stream),
           (to, from, bytes, stream)) {
    copy(stream, Wait::no, linear(host_end(to), device_end(from), bytes));
}
STREAM_API(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
           (to, from, bytes, stream)) {
    copy(stream, Wait::no, linear(device_end(to), device_end(from), bytes));
}
STREAM_API(cuMemcpyPeerAsync,
           (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
            size_t bytes, CUstream stream),
           (to, to_context, from, from_context, bytes, stream)) {
    context_of(to_context);
    context_of(from_context);
    copy(stream, Wait::no, linear(device_end(to), device_end(from), bytes));
}
STREAM_API(cuMemcpyBatchAsync_v2,
           (CUdeviceptr * to, CUdeviceptr* from, size_t* sizes, size_t count,
            CUmemcpyAttributes* attributes, size_t* starts, size_t kinds, CUstream stream),
           (to, from, sizes, count, attributes, starts, kinds, stream)) {
    copy_batch(stream, to, from, sizes, count, attributes, starts, kinds);
}
STREAM_API(cuMemcpy3DBatchAsync_v2,
           (size_t count, CUDA_MEMCPY3D_BATCH_OP* operations, unsigned long long flags,
            CUstream stream),
           (count, operations, flags, stream)) {
    copy_batch(stream, operations, count, flags);
}
STREAM_API(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D* what, CUstream stream), (what, stream)) {
    copy(stream, Wait::no, described(what));
}
STREAM_API(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D* what, CUstream stream), (what, stream)) {
    copy(stream, Wait::no, described(what));
}
STREAM_API(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER* what, CUstream stream), (what, stream)) {
    const auto wanted = described(what);
    contexts_of(*what);
    copy(stream, Wait::no, wanted);
}

#define FILL_API(bits, type)                                                                    \
    DEFAULT_STREAM_API(cuMemsetD##bits##_v2, (CUdeviceptr to, type value, size_t count),        \
                       (to, value, count)) {                                                    \
        fill(stream, Wait::yes, to, value, bits / 8, count);                                    \
    }                                                                                           \
    STREAM_API(cuMemsetD##bits##Async,                                                          \
               (CUdeviceptr to, type value, size_t count, CUstream stream),                     \
               (to, value, count, stream)) {                                                    \
        fill(stream, Wait::no, to, value, bits / 8, count);                                     \
    }                                                                                           \
    DEFAULT_STREAM_API(cuMemsetD2D##bits##_v2,                                                  \
                       (CUdeviceptr to, size_t pitch, type value, size_t width, size_t rows),   \
                       (to, pitch, value, width, rows)) {                                       \
        fill(stream, Wait::yes, to, value, bits / 8, width, rows, pitch);                       \
    }                                                                                           \
    STREAM_API(                                                                                 \
        cuMemsetD2D##bits##Async,                                                               \
        (CUdeviceptr to, size_t pitch, type value, size_t width, size_t rows, CUstream stream), \
        (to, pitch, value, width, rows, stream)) {                                              \
        fill(stream, Wait::no, to, value, bits / 8, width, rows, pitch);                        \
    }
FILL_API(8, unsigned char)
FILL_API(16, unsigned short)
FILL_API(32, unsigned int)
