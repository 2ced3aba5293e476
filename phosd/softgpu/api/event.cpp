// Events.
#include <chrono>

#include "api/api.h"
#include "core/submit.h"
#include "core/work.h"

using namespace phos::softgpu;

namespace {

EventPtr event_of(CUevent handle) {
    return runtime().events.get(handle);
}

float elapsed(CUevent start, CUevent end) {
    const EventPtr first = event_of(start), last = event_of(end);
    require(!((first->flags | last->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
    const auto from = first->record(), to = last->record();
    require(from && to, CUDA_ERROR_INVALID_HANDLE);
    first->context->check();
    require(from->mark.reached() && to->mark.reached(), CUDA_ERROR_NOT_READY);
    return std::chrono::duration<float, std::milli>(to->time - from->time).count();
}

}  // namespace

API(cuEventCreate, (CUevent * handle, unsigned flags), (handle, flags)) {
    constexpr unsigned known =
        CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    require(handle != nullptr && (flags & ~known) == 0);
    require(!(flags & CU_EVENT_INTERPROCESS), CUDA_ERROR_NOT_SUPPORTED);
    *handle = runtime().events.add(std::make_shared<Event>(current(), flags));
}

API(cuEventDestroy_v2, (CUevent handle), (handle)) {
    runtime().events.remove(handle);
}

STREAM_API(cuEventRecord, (CUevent handle, CUstream stream), (handle, stream)) {
    record(event_of(handle), stream_of(stream));
}
STREAM_API(cuEventRecordWithFlags, (CUevent handle, CUstream stream, unsigned flags),
           (handle, stream, flags)) {
    require((flags & ~unsigned{CU_EVENT_RECORD_EXTERNAL}) == 0);
    record(event_of(handle), stream_of(stream), flags & CU_EVENT_RECORD_EXTERNAL);
}

STREAM_API(cuStreamWaitEvent, (CUstream stream, CUevent handle, unsigned flags),
           (stream, handle, flags)) {
    require((flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL}) == 0);
    wait_for(event_of(handle), stream_of(stream), flags & CU_EVENT_WAIT_EXTERNAL);
}

POLLING_API(cuEventQuery, (CUevent handle), (handle)) {
    const EventPtr event = event_of(handle);
    forbid_captured(event);
    forbid_during_capture();
    event->context->check();
    const auto record = event->record();
    require(!record || record->mark.reached(), CUDA_ERROR_NOT_READY);
}

API(cuEventSynchronize, (CUevent handle), (handle)) {
    const EventPtr event = event_of(handle);
    forbid_captured(event);
    forbid_during_capture();
    if (const auto record = event->record()) record->mark.wait();
    event->context->check();
}

API(cuEventElapsedTime_v2, (float* milliseconds, CUevent start, CUevent end),
    (milliseconds, start, end)) {
    require(milliseconds != nullptr);
    *milliseconds = elapsed(start, end);
}
API(cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end),
    (milliseconds, start, end)) {
    require(milliseconds != nullptr);
    *milliseconds = elapsed(start, end);
}

API(cuCtxRecordEvent, (CUcontext handle, CUevent event), (handle, event)) {
    const ContextPtr context =
        handle ? runtime().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT) : current();
    forbid_during_capture();
    forbid_during_capture_in(*context);
    record_all(event_of(event), context);
}

API(cuCtxWaitEvent, (CUcontext handle, CUevent event), (handle, event)) {
    const ContextPtr context =
        handle ? runtime().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT) : current();
    forbid_during_capture();
    wait_for_all(event_of(event), context);
}
