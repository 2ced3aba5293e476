#include "core/capture.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include "core/context.h"
#include "core/error.h"
#include "core/runtime.h"
#include "core/submit.h"

namespace phos::softgpu {
namespace {

std::mutex& g_mutex = *new std::mutex;
std::vector<std::shared_ptr<Capture>>& g_captures = *new std::vector<std::shared_ptr<Capture>>;
std::atomic<size_t> g_count{0};

void finish(const std::shared_ptr<Capture>& capture) {
    g_captures.erase(std::find(g_captures.begin(), g_captures.end(), capture));
    g_count = g_captures.size();
}

// The capture that a stream takes part in. A stream that joined another's capture is let go of
// when that one ends, which it notices here.
std::shared_ptr<Capture> capture_of(const StreamPtr& stream) {
    auto& capture = stream->capture;
    if (capture && std::find(g_captures.begin(), g_captures.end(), capture) == g_captures.end()) {
        capture = nullptr;
        stream->next_nodes.clear();
    }
    return capture;
}

[[noreturn]] void invalidate(Capture& capture, CUresult code) {
    capture.valid = false;
    fail(code);
}

void need_valid(const Capture& capture) {
    require(capture.valid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

// Legacy work would have to wait for the captured streams of its context, which do not run.
void refuse_legacy(const StreamPtr& stream) {
    if (stream->kind != Stream::Kind::legacy) return;
    for (const auto& capture : g_captures)
        for (const Stream* captured : capture->streams)
            if (&captured->context == &stream->context && captured->blocking())
                invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
}

void join(std::vector<Node*>& nodes, const std::vector<Node*>& more) {
    for (Node* node : more)
        if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
}

// Every node that must be complete before these are, and these.
std::set<const Node*> behind(const std::vector<Node*>& nodes) {
    std::set<const Node*> seen;
    std::vector<const Node*> todo(nodes.begin(), nodes.end());
    while (!todo.empty()) {
        const Node* node = todo.back();
        todo.pop_back();
        if (seen.insert(node).second)
            todo.insert(todo.end(), node->dependencies.begin(), node->dependencies.end());
    }
    return seen;
}

}  // namespace

bool any_capture() {
    return g_count.load() > 0;
}

void begin_capture(const StreamPtr& stream, CUstreamCaptureMode mode, GraphPtr into,
                   std::vector<Node*> after) {
    require(mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    require(stream->kind != Stream::Kind::legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    static std::atomic<uint64_t> last_id{0};
    std::lock_guard lock(g_mutex);
    require(!capture_of(stream), CUDA_ERROR_ILLEGAL_STATE);
    auto capture = std::make_shared<Capture>();
    capture->graph = into ? std::move(into) : std::make_shared<Graph>();
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream.get();
    capture->id = ++last_id;
    capture->streams.push_back(stream.get());
    stream->capture = capture;
    stream->next_nodes = std::move(after);
    g_captures.push_back(std::move(capture));
    g_count = g_captures.size();
}

GraphPtr end_capture(const StreamPtr& stream) {
    std::lock_guard lock(g_mutex);
    const auto capture = capture_of(stream);
    require(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
    if (capture->origin != stream.get()) invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        require(capture->thread == std::this_thread::get_id(),
                CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    const auto joined = behind(stream->next_nodes);
    finish(capture);
    stream->capture = nullptr;
    stream->next_nodes.clear();
    need_valid(*capture);
    for (const auto& node : capture->graph->nodes())
        require(joined.count(node.get()) > 0 || capture->streams.size() == 1,
                CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    return capture->graph;
}

CaptureInfo capture_info(const StreamPtr& stream) {
    if (!any_capture()) return {};
    std::lock_guard lock(g_mutex);
    const auto capture = capture_of(stream);
    if (!capture) return {};
    if (!capture->valid) return {CU_STREAM_CAPTURE_STATUS_INVALIDATED, capture->id, nullptr, {}};
    return {CU_STREAM_CAPTURE_STATUS_ACTIVE, capture->id, capture->graph, stream->next_nodes};
}

void set_next(const StreamPtr& stream, std::vector<Node*> nodes, bool replace) {
    std::lock_guard lock(g_mutex);
    const auto capture = capture_of(stream);
    require(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
    need_valid(*capture);
    for (const Node* node : nodes) require(node->graph == capture->graph.get());
    if (replace) stream->next_nodes.clear();
    join(stream->next_nodes, nodes);
}

bool capture_work(const StreamPtr& stream, const WorkPtr& work, std::optional<CUgraphNodeType> type,
                  EventPtr event) {
    std::lock_guard lock(g_mutex);
    const auto capture = capture_of(stream);
    if (!capture) {
        refuse_legacy(stream);
        return false;
    }
    need_valid(*capture);
    Node node;
    node.type = type ? *type : work->node_type();
    node.work = work;
    node.event = std::move(event);
    node.dependencies = stream->next_nodes;
    stream->next_nodes = {&capture->graph->add(std::move(node))};
    return true;
}

bool capture_record(const EventPtr& event, const StreamPtr& stream) {
    std::lock_guard lock(g_mutex);
    const auto capture = capture_of(stream);
    if (!capture) {
        refuse_legacy(stream);
        return false;
    }
    need_valid(*capture);
    auto captured = std::make_shared<Event::Captured>();
    captured->capture = capture;
    captured->nodes = stream->next_nodes;
    event->set(nullptr, std::move(captured));
    return true;
}

bool capture_wait(const EventPtr& event, const StreamPtr& stream) {
    std::lock_guard lock(g_mutex);
    const auto own = capture_of(stream);
    const auto captured = event->captured();
    if (!captured) {
        if (!own) {
            refuse_legacy(stream);
            return false;
        }
        need_valid(*own);
        // What runs outside the capture cannot be waited for inside.
        if (event->record()) invalidate(*own, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        return true;
    }
    const auto capture = captured->capture.lock();
    require(capture && std::find(g_captures.begin(), g_captures.end(), capture) != g_captures.end(),
            CUDA_ERROR_CAPTURED_EVENT);
    need_valid(*capture);
    if (own && own != capture) {
        own->valid = false;
        invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    if (!own) {
        if (stream->kind == Stream::Kind::legacy)
            invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        stream->capture = capture;
        stream->next_nodes.clear();
        capture->streams.push_back(stream.get());
    }
    join(stream->next_nodes, captured->nodes);
    return true;
}

bool captures(const StreamPtr& stream) {
    return capture_info(stream).status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void forbid_during_capture() {
    if (!any_capture()) return;
    const CUstreamCaptureMode mode = this_thread().capture_mode;
    if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return;
    std::lock_guard lock(g_mutex);
    bool forbidden = false;
    for (const auto& capture : g_captures) {
        const bool own = capture->thread == std::this_thread::get_id() &&
                         capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        const bool global =
            mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!own && !global) continue;
        capture->valid = false;
        forbidden = true;
    }
    require(!forbidden, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void forbid_during_capture_in(const Context& context) {
    if (!any_capture()) return;
    std::lock_guard lock(g_mutex);
    bool forbidden = false;
    for (const auto& capture : g_captures)
        for (const Stream* stream : capture->streams) {
            if (&stream->context != &context) continue;
            capture->valid = false;
            forbidden = true;
        }
    require(!forbidden, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void forbid_capturing(const StreamPtr& stream) {
    if (!any_capture()) return;
    std::lock_guard lock(g_mutex);
    if (const auto capture = capture_of(stream))
        invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream->kind == Stream::Kind::legacy) refuse_legacy(stream);
}

void forbid_captured(const EventPtr& event) {
    const auto captured = event->captured();
    if (!captured) return;
    std::lock_guard lock(g_mutex);
    if (const auto capture = captured->capture.lock()) capture->valid = false;
    fail(CUDA_ERROR_CAPTURED_EVENT);
}

}  // namespace phos::softgpu
