// Stream capture: what is submitted to a stream becomes nodes of a graph.
#pragma once

#include <cuda.h>

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/event.h"
#include "core/graph.h"
#include "core/stream.h"

namespace phos::softgpu {

// Everything here is under one lock of the process, taken only while a capture is under way.
struct Capture {
    GraphPtr graph;
    CUstreamCaptureMode mode;
    std::thread::id thread;  // that began it
    const Stream* origin;
    uint64_t id;
    bool valid = true;
    std::vector<const Stream*> streams;  // that take part
};

// What an event stands for that was recorded in a capture.
struct Event::Captured {
    std::weak_ptr<Capture> capture;
    std::vector<Node*> nodes;
};

struct CaptureInfo {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    uint64_t id = 0;
    GraphPtr graph;
    std::vector<Node*> next;  // what the next node will depend on
};

void begin_capture(const StreamPtr& stream, CUstreamCaptureMode mode, GraphPtr into,
                   std::vector<Node*> after);
// Throws why the capture is no good; it is over in any case.
GraphPtr end_capture(const StreamPtr& stream);
CaptureInfo capture_info(const StreamPtr& stream);
void set_next(const StreamPtr& stream, std::vector<Node*> nodes, bool replace);

// The parts of submit.h. The first is false when the stream does not capture. Without a type the
// node is what the work says that it is, which is asked only then: not all work can be a node.
bool capture_work(const StreamPtr& stream, const WorkPtr& work,
                  std::optional<CUgraphNodeType> type = {}, EventPtr event = nullptr);
bool capture_record(const EventPtr& event, const StreamPtr& stream);
bool capture_wait(const EventPtr& event, const StreamPtr& stream);
bool any_capture();

}  // namespace phos::softgpu
