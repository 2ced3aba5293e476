#include "write_sets/writes.h"

#include <cstring>

#include "memory/contexts.h"

namespace phos::write_sets {
namespace {

constexpr cow::Range kNothing{0, 0};

bool start_of(CUmemorytype type, const void* host, CUdeviceptr device, uint64_t* start) {
    *start = type == CU_MEMORYTYPE_HOST ? address_of(host) : device;
    return type != CU_MEMORYTYPE_ARRAY;
}

// For both structs with three dimensions.
template <class Copy>
cow::Range destination_of_box(const Copy& copy) {
    uint64_t start = 0;
    if (!start_of(copy.dstMemoryType, copy.dstHost, copy.dstDevice, &start)) return kNothing;
    const uint64_t pitch = copy.dstPitch ? copy.dstPitch : copy.WidthInBytes;
    const uint64_t layer = copy.dstHeight ? copy.dstHeight : copy.Height;
    start += (copy.dstZ * layer + copy.dstY) * pitch + copy.dstXInBytes;
    return span_of({start, copy.WidthInBytes, pitch, copy.Height, layer, copy.Depth});
}

}  // namespace

cow::Range span_of(const Box& box) {
    if (!box.width || !box.height || !box.depth) return kNothing;
    uint64_t rows = 0;
    uint64_t before = 0;
    uint64_t end = 0;
    if (__builtin_mul_overflow(box.depth - 1, box.layer, &rows) ||
        __builtin_add_overflow(rows, box.height - 1, &rows) ||
        __builtin_mul_overflow(rows, box.pitch, &before) ||
        __builtin_add_overflow(before, box.width, &end) ||
        __builtin_add_overflow(end, box.begin, &end))
        end = ~0ull;
    return {box.begin, end};
}

cow::Range destination_of(const CUDA_MEMCPY2D_v2& copy) {
    uint64_t start = 0;
    if (!start_of(copy.dstMemoryType, copy.dstHost, copy.dstDevice, &start)) return kNothing;
    const uint64_t pitch = copy.dstPitch ? copy.dstPitch : copy.WidthInBytes;
    start += copy.dstY * pitch + copy.dstXInBytes;
    return span_of({start, copy.WidthInBytes, pitch, copy.Height, copy.Height, 1});
}

cow::Range destination_of(const CUDA_MEMCPY3D_v2& copy) {
    return destination_of_box(copy);
}

cow::Range destination_of(const CUDA_MEMCPY3D_PEER& copy) {
    return destination_of_box(copy);
}

cow::Range destination_of(const CUDA_MEMSET_NODE_PARAMS& fill) {
    return span_of(
        {fill.dst, fill.width * fill.elementSize, fill.pitch, fill.height, fill.height, 1});
}

bool destination_of(const CUstreamBatchMemOpParams& operation, cow::Range* written) {
    *written = kNothing;
    const uint64_t address = operation.writeValue.address;
    uint32_t kind = 0;  // a newer kind may be no value of the enumeration
    std::memcpy(&kind, &operation.operation, sizeof kind);
    switch (kind) {
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
            *written = {address, address + sizeof(cuuint32_t)};
            return true;
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            *written = {address, address + sizeof(cuuint64_t)};
            return true;
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        case CU_STREAM_MEM_OP_BARRIER:
            return true;
    }
    return false;
}

void OperationBatch::predict(Prediction& prediction, CUstream, unsigned count,
                             const CUstreamBatchMemOpParams* operations, unsigned) {
    cow::Range written;
    for (unsigned i = 0; operations && i < count; ++i) {
        if (!destination_of(operations[i], &written)) return prediction.everything();
        prediction.bytes(written.begin, written.end - written.begin);
    }
}

bool is_captured(const cow::Where& where) {
    if (!contexts::captures()) return false;
    const auto ask = where.per_thread && driver.cuStreamIsCapturing_ptsz
                         ? driver.cuStreamIsCapturing_ptsz
                         : driver.cuStreamIsCapturing;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    // The query fails for the legacy stream while a stream that waits for it is capturing; it then
    // cannot be given work either.
    return ask(where.stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace phos::write_sets
