#include "core/submit.h"

#include "core/capture.h"
#include "core/context.h"
#include "core/work.h"

namespace phos::softgpu {

Mark submit(const StreamPtr& stream, WorkPtr work) {
    if (any_capture() && capture_work(stream, work)) return {};
    return stream->context.submit(*stream, std::move(work));
}

Mark submit_alone(const StreamPtr& stream, WorkPtr work, const std::set<ContextPtr>& contexts) {
    std::vector<Mark> before;
    for (const ContextPtr& context : contexts)
        for (Mark& mark : context->tails()) before.push_back(std::move(mark));
    const Mark mark = stream->context.submit(*stream, std::move(work), std::move(before));
    for (const ContextPtr& context : contexts) context->wait_everywhere(mark);
    return mark;
}

void record(const EventPtr& event, const StreamPtr& stream, bool external) {
    if (any_capture() &&
        (external ? capture_work(stream, nullptr, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event)
                  : capture_record(event, stream)))
        return;
    auto record = std::make_shared<Event::Record>();
    record->mark = stream->context.submit(*stream, std::make_shared<RecordEvent>(record));
    event->set(std::move(record), nullptr);
}

void wait_for(const EventPtr& event, const StreamPtr& stream, bool external) {
    if ((any_capture() || event->captured()) &&
        (external ? capture_work(stream, nullptr, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event)
                  : capture_wait(event, stream)))
        return;
    const auto record = event->record();
    if (!record || record->mark.reached()) return;
    stream->context.submit(*stream, std::make_shared<Nothing>(), {record->mark});
}

void record_all(const EventPtr& event, const ContextPtr& context) {
    auto record = std::make_shared<Event::Record>();
    record->mark = context->submit(*context->recorder(), std::make_shared<RecordEvent>(record),
                                   context->tails());
    event->set(std::move(record), nullptr);
}

void wait_for_all(const EventPtr& event, const ContextPtr& context) {
    const auto record = event->record();
    if (!record || record->mark.reached()) return;
    context->wait_everywhere(record->mark);
}

}  // namespace phos::softgpu
