#include "core/submit.h"

#include "core/context.h"
#include "core/work.h"

namespace phos::softgpu {

Mark submit(const StreamPtr& stream, WorkPtr work) {
    return stream->context.submit(*stream, std::move(work));
}

void record(const EventPtr& event, const StreamPtr& stream, bool) {
    auto record = std::make_shared<Event::Record>();
    record->mark = stream->context.submit(*stream, std::make_shared<RecordEvent>(record));
    event->set(std::move(record), nullptr);
}

void wait_for(const EventPtr& event, const StreamPtr& stream, bool) {
    const auto record = event->record();
    if (!record || record->mark.reached()) return;
    stream->context.submit(*stream, std::make_shared<Nothing>(), {record->mark});
}

void record_all(const EventPtr& event, const ContextPtr& context) {
    auto record = std::make_shared<Event::Record>();
    record->mark = context->submit(*context->legacy(), std::make_shared<RecordEvent>(record),
                                   context->tails());
    event->set(std::move(record), nullptr);
}

void wait_for_all(const EventPtr& event, const ContextPtr& context) {
    const auto record = event->record();
    if (!record || record->mark.reached()) return;
    context->wait_everywhere(record->mark);
}

bool captures(const StreamPtr&) {
    return false;
}
void forbid_during_capture() {}
void forbid_capturing(const StreamPtr&) {}
void forbid_captured(const EventPtr&) {}

}  // namespace phos::softgpu
