// Stream capture.
#include "core/capture.h"

#include "api/api.h"
#include "core/submit.h"

using namespace phos::softgpu;

namespace {

std::vector<Node*> nodes_of(const CUgraphNode* handles, size_t count) {
    require(handles != nullptr || count == 0);
    std::vector<Node*> nodes;
    for (size_t i = 0; i < count; ++i)
        nodes.push_back(runtime().nodes.get(handles[i], CUDA_ERROR_INVALID_VALUE).get());
    return nodes;
}

void plain_edges(const CUgraphEdgeData* edges, size_t count) {
    for (size_t i = 0; edges && i < count; ++i)
        require(edges[i].from_port == 0 && edges[i].to_port == 0 && edges[i].type == 0,
                CUDA_ERROR_NOT_SUPPORTED);
}

void get_info(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
              const CUgraphNode** dependencies, size_t* count) {
    require(status != nullptr);
    const CaptureInfo info = capture_info(stream_of(stream));
    *status = info.status;
    if (info.status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return;
    if (id) *id = info.id;
    if (graph) {
        if (!runtime().graphs.find(reinterpret_cast<CUgraph>(info.graph.get())))
            runtime().graphs.add(info.graph);
        *graph = reinterpret_cast<CUgraph>(info.graph.get());
    }
    // The caller's view is valid until the next call on the stream from this thread.
    static thread_local std::vector<CUgraphNode> view;
    view.clear();
    for (Node* node : info.next) view.push_back(reinterpret_cast<CUgraphNode>(node));
    if (dependencies) *dependencies = view.data();
    if (count) *count = view.size();
}

void update(CUstream stream, CUgraphNode* nodes, size_t count, unsigned flags) {
    require(flags <= CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    set_next(stream_of(stream), nodes_of(nodes, count),
             flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

}  // namespace

STREAM_API(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), (stream, mode)) {
    begin_capture(stream_of(stream), mode, nullptr, {});
}

STREAM_API(cuStreamEndCapture, (CUstream stream, CUgraph* graph), (stream, graph)) {
    require(graph != nullptr);
    *graph = nullptr;
    const GraphPtr captured = end_capture(stream_of(stream));
    const auto handle = reinterpret_cast<CUgraph>(captured.get());
    *graph = runtime().graphs.find(handle) ? handle : runtime().graphs.add(captured);
}

STREAM_API(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus* status),
           (stream, status)) {
    require(status != nullptr);
    *status = capture_info(stream_of(stream)).status;
}

STREAM_API(cuStreamGetCaptureInfo_v2,
           (CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
            const CUgraphNode** dependencies, size_t* count),
           (stream, status, id, graph, dependencies, count)) {
    get_info(stream, status, id, graph, dependencies, count);
}
STREAM_API(cuStreamGetCaptureInfo_v3,
           (CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
            const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count),
           (stream, status, id, graph, dependencies, edges, count)) {
    get_info(stream, status, id, graph, dependencies, count);
    // All are plain; there are as many as nodes.
    static thread_local std::vector<CUgraphEdgeData> plain;
    if (!edges) return;
    plain.assign(capture_info(stream_of(stream)).next.size() + 1, CUgraphEdgeData{});
    *edges = plain.data();
}

STREAM_API(cuStreamUpdateCaptureDependencies,
           (CUstream stream, CUgraphNode* nodes, size_t count, unsigned flags),
           (stream, nodes, count, flags)) {
    update(stream, nodes, count, flags);
}
STREAM_API(cuStreamUpdateCaptureDependencies_v2,
           (CUstream stream, CUgraphNode* nodes, const CUgraphEdgeData* edges, size_t count,
            unsigned flags),
           (stream, nodes, edges, count, flags)) {
    plain_edges(edges, count);
    update(stream, nodes, count, flags);
}

STREAM_API(cuStreamBeginCaptureToGraph,
           (CUstream stream, CUgraph graph, const CUgraphNode* nodes, const CUgraphEdgeData* edges,
            size_t count, CUstreamCaptureMode mode),
           (stream, graph, nodes, edges, count, mode)) {
    plain_edges(edges, count);
    begin_capture(stream_of(stream), mode, runtime().graphs.get(graph), nodes_of(nodes, count));
}

API(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode), (mode)) {
    require(mode != nullptr && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    std::swap(*mode, this_thread().capture_mode);
}
