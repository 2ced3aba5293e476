// The one way by which work reaches a stream: it runs, or becomes a node of the graph that the
// stream is captured into.
#pragma once

#include <set>

#include "core/event.h"
#include "core/stream.h"

namespace phos::softgpu {

// The mark is empty when the work was captured.
Mark submit(const StreamPtr& stream, WorkPtr work);
// Work that follows all earlier work of the contexts and precedes all that comes later. Never
// captured.
Mark submit_alone(const StreamPtr& stream, WorkPtr work,
                  const std::set<std::shared_ptr<Context>>& contexts);
void record(const EventPtr& event, const StreamPtr& stream, bool external = false);
void wait_for(const EventPtr& event, const StreamPtr& stream, bool external = false);
// All of a context's work so far; all of its work to come.
void record_all(const EventPtr& event, const std::shared_ptr<Context>& context);
void wait_for_all(const EventPtr& event, const std::shared_ptr<Context>& context);

bool captures(const StreamPtr& stream);
// For calls that a capture forbids (they would wait, or act at once): they throw and end it.
void forbid_during_capture();
void forbid_during_capture_in(const Context& context);  // whatever the modes of captures there
void forbid_capturing(const StreamPtr& stream);
void forbid_captured(const EventPtr& event);

}  // namespace phos::softgpu
