// Follow contexts, captures and peer access as the program creates and ends them.
#include "memory/contexts.h"

#include "base/overrides.h"
#include "code/kernels.h"
#include "gate/gate.h"
#include "memory/events.h"
#include "memory/heap.h"
#include "memory/stream_frees.h"

namespace phos {
namespace {

void forget(CUcontext context) {
    if (!contexts::forget(context)) return;
    events::context_ending(context);
    stream_frees::context_ending(context);
}

template <class Begin>
CUresult begin_capture(CUstream stream, bool per_thread, Begin begin) {
    const gate::Pass pass;
    const std::lock_guard lock(contexts::mutex);
    const CUresult result = begin();
    if (result == CUDA_SUCCESS) contexts::capture_began(stream, per_thread);
    return result;
}

// Not held at the gate: a closing gate waits for the end of captures.
CUresult end_capture(CUstream stream, CUgraph* graph, bool per_thread) {
    const auto end = per_thread ? driver.cuStreamEndCapture_ptsz : driver.cuStreamEndCapture;
    const auto ask = per_thread && driver.cuStreamIsCapturing_ptsz ? driver.cuStreamIsCapturing_ptsz
                                                                   : driver.cuStreamIsCapturing;
    const CUresult result = end(stream, graph);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)
        return result;  // still capturing, e.g. ended on the wrong thread
    const std::lock_guard lock(contexts::mutex);
    contexts::capture_ended(stream, per_thread);
    return result;
}

CUresult destroy_stream(CUstream stream, CUresult (*destroy)(CUstream)) {
    const CUresult result = destroy(stream);
    const std::lock_guard lock(contexts::mutex);
    if (result == CUDA_SUCCESS) contexts::capture_ended(stream, false);
    return result;
}

template <class Create>
CUresult create_context(CUcontext* context, bool primary, Create create) {
    const gate::Pass pass;
    const CUresult result = create();
    if (result == CUDA_SUCCESS && context) contexts::add(*context, primary);
    return result;
}

// The driver frees the context's own memory with it; memory that the hook made for it is freed
// here.
CUresult destroy_context(CUcontext context, CUresult (*destroy)(CUcontext)) {
    const gate::Pass pass;
    forget(context);
    const CUresult result = destroy(context);
    stream_frees::context_ended(context, result == CUDA_SUCCESS);
    kernels::forget_functions();
    if (result == CUDA_SUCCESS)
        stream_frees::free_all_of(context);
    else if (context)
        contexts::add(context, false);
    return result;
}

CUresult end_primary(CUdevice device, CUresult (*end)(CUdevice)) {
    const gate::Pass pass;
    CUcontext const primary = contexts::primary_on(device);
    if (primary) forget(primary);
    const CUresult result = end(device);
    kernels::forget_functions();
    unsigned flags = 0;
    int active = 1;
    const bool gone = driver.cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS &&
                      result == CUDA_SUCCESS && !active;
    if (!primary) return result;
    const bool ended = gone || (result == CUDA_SUCCESS && end != driver.cuDevicePrimaryCtxRelease &&
                                end != driver.cuDevicePrimaryCtxRelease_v2);
    stream_frees::context_ended(primary, ended);
    if (ended) stream_frees::free_all_of(primary);
    if (!gone) contexts::add(primary, true);
    return result;
}

CUresult change_peer(CUcontext peer, CUresult result, int change) {
    CUcontext context;
    int device;
    if (result != CUDA_SUCCESS || !contexts::current(&context, &device)) return result;
    const int owner = contexts::device_of(peer);
    if (contexts::count_peer(device, owner, change))
        heap::set_peer_access(owner, device, change > 0);
    return result;
}

}  // namespace

CUresult overrides::cuCtxCreate(CUcontext* context, unsigned flags, CUdevice device) {
    return create_context(context, false,
                          [&] { return driver.cuCtxCreate(context, flags, device); });
}
CUresult overrides::cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
    return create_context(context, false,
                          [&] { return driver.cuCtxCreate_v2(context, flags, device); });
}
CUresult overrides::cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam* affinity, int count,
                                   unsigned flags, CUdevice device) {
    return create_context(context, false, [&] {
        return driver.cuCtxCreate_v3(context, affinity, count, flags, device);
    });
}
CUresult overrides::cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* parameters,
                                   unsigned flags, CUdevice device) {
    return create_context(
        context, false, [&] { return driver.cuCtxCreate_v4(context, parameters, flags, device); });
}
CUresult overrides::cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return create_context(context, true,
                          [&] { return driver.cuDevicePrimaryCtxRetain(context, device); });
}
CUresult overrides::cuCtxDestroy(CUcontext context) {
    return destroy_context(context, driver.cuCtxDestroy);
}
CUresult overrides::cuCtxDestroy_v2(CUcontext context) {
    return destroy_context(context, driver.cuCtxDestroy_v2);
}
CUresult overrides::cuDevicePrimaryCtxRelease(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxRelease);
}
CUresult overrides::cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxRelease_v2);
}
CUresult overrides::cuDevicePrimaryCtxReset(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxReset);
}
CUresult overrides::cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxReset_v2);
}
CUresult overrides::cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    const gate::Pass pass;
    return change_peer(peer, driver.cuCtxEnablePeerAccess(peer, flags), 1);
}
CUresult overrides::cuCtxDisablePeerAccess(CUcontext peer) {
    const gate::Pass pass;
    return change_peer(peer, driver.cuCtxDisablePeerAccess(peer), -1);
}

CUresult overrides::cuStreamBeginCapture(CUstream stream) {
    return begin_capture(stream, false, [&] { return driver.cuStreamBeginCapture(stream); });
}
CUresult overrides::cuStreamBeginCapture_ptsz(CUstream stream) {
    return begin_capture(stream, true, [&] { return driver.cuStreamBeginCapture_ptsz(stream); });
}
CUresult overrides::cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return begin_capture(stream, false,
                         [&] { return driver.cuStreamBeginCapture_v2(stream, mode); });
}
CUresult overrides::cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    return begin_capture(stream, true,
                         [&] { return driver.cuStreamBeginCapture_v2_ptsz(stream, mode); });
}
CUresult overrides::cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph,
                                                const CUgraphNode* nodes,
                                                const CUgraphEdgeData* edges, size_t count,
                                                CUstreamCaptureMode mode) {
    return begin_capture(stream, false, [&] {
        return driver.cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode);
    });
}
CUresult overrides::cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph,
                                                     const CUgraphNode* nodes,
                                                     const CUgraphEdgeData* edges, size_t count,
                                                     CUstreamCaptureMode mode) {
    return begin_capture(stream, true, [&] {
        return driver.cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode);
    });
}
CUresult overrides::cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    return end_capture(stream, graph, false);
}
CUresult overrides::cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
    return end_capture(stream, graph, true);
}
CUresult overrides::cuStreamDestroy(CUstream stream) {
    return destroy_stream(stream, driver.cuStreamDestroy);
}
CUresult overrides::cuStreamDestroy_v2(CUstream stream) {
    return destroy_stream(stream, driver.cuStreamDestroy_v2);
}

}  // namespace phos
