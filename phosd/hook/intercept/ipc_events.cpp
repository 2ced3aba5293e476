#include "intercept/ipc_events.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "base/log.h"
#include "base/overrides.h"
#include "base/process.h"
#include "gate/gate.h"
#include "intercept/legacy_ipc.h"
#include "memory/contexts.h"
#include "memory/shared_events.h"

namespace phos {
namespace {

using event_words::Counter;
using event_words::kCounters;
using event_words::Place;
using event_words::Promise;
using event_words::Record;
using event_words::Words;
using legacy_ipc::Ticket;
using shared_events::Event;
using shared_events::EventPtr;
using shared_events::find;
using shared_events::refuse;

constexpr long kFirstPause = 10'000;  // nanoseconds between two looks at an event of a peer's
constexpr long kLongestPause = 1'000'000;

// The functions for the two meanings of stream 0.
struct StreamCalls {
    bool per_thread;

    bool capturing(CUstream stream) const {
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        const auto ask = per_thread && driver.cuStreamIsCapturing_ptsz
                             ? driver.cuStreamIsCapturing_ptsz
                             : driver.cuStreamIsCapturing;
        return contexts::captures() && ask(stream, &status) == CUDA_SUCCESS &&
               status != CU_STREAM_CAPTURE_STATUS_NONE;
    }
    unsigned long long id_of(CUstream stream) const {
        unsigned long long id = 0;
        const auto ask = per_thread && driver.cuStreamGetId_ptsz ? driver.cuStreamGetId_ptsz
                                                                 : driver.cuStreamGetId;
        return ask && ask(stream, &id) == CUDA_SUCCESS ? id : 0;
    }
    int device_of(CUstream stream) const {
        CUcontext context = nullptr;
        const auto ask = per_thread && driver.cuStreamGetCtx_ptsz ? driver.cuStreamGetCtx_ptsz
                                                                  : driver.cuStreamGetCtx;
        return ask(stream, &context) == CUDA_SUCCESS ? contexts::device_of(context) : -1;
    }
    CUresult write(CUstream stream, uint64_t address, uint32_t value) const {
        const auto call = per_thread && driver.cuStreamWriteValue32_v2_ptsz
                              ? driver.cuStreamWriteValue32_v2_ptsz
                              : driver.cuStreamWriteValue32_v2;
        return call(stream, address, value, CU_STREAM_WRITE_VALUE_DEFAULT);
    }
    CUresult wait(CUstream stream, uint64_t address, uint32_t value) const {
        const auto call = per_thread && driver.cuStreamWaitValue32_v2_ptsz
                              ? driver.cuStreamWaitValue32_v2_ptsz
                              : driver.cuStreamWaitValue32_v2;
        return call(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ);
    }
};

// Promises a record on a stream: of a counter whose last promise was for the same stream, or one at
// rest. `behind` is set if there is none: then the stream has to wait for the value before.
Record promise(Event& event, unsigned long long stream, bool* behind) {
    Counter* const counters = event.place.words().counters;
    Record record;
    record.generation = event.place.generation;
    const auto claim = [&](uint32_t counter, const Promise& before) {
        const Promise mine{before.value + 1, getpid()};
        record.counter = counter;
        record.value = mine.value;
        if (!counters[counter].replace(before, mine)) return false;
        event.made[counter] = {stream, mine};
        return true;
    };
    *behind = false;
    for (uint32_t i = 0; stream && i < kCounters; ++i)
        if (event.made[i].stream == stream && claim(i, event.made[i].promise)) return record;
    for (uint32_t i = 0; i < kCounters; ++i) {
        const Promise before = counters[i].promise();
        if (counters[i].reached.load() == before.value && claim(i, before)) return record;
    }
    // More streams than counters record this one event at the same time. Behind a promise of this
    // process, if there is one: it is kept as long as it matters.
    *behind = true;
    event.place.words().keep_promises_of_the_dead();
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < kCounters; ++i)
        if (counters[i].promise().by == getpid()) chosen = i;
    while (!claim(chosen, counters[chosen].promise())) {
    }
    return record;
}

// Tells the others of a record that the driver has accepted for the same event and stream.
CUresult tell(Event& event, CUstream stream, const StreamCalls& calls) {
    bool behind = false;
    const unsigned long long id = calls.id_of(stream);
    const Record record = promise(event, id, &behind);
    const uint64_t address = event.place.address_of(record);
    CUresult result = CUDA_SUCCESS;
    if (behind) result = calls.wait(stream, address, record.value - 1);
    if (result == CUDA_SUCCESS) result = calls.write(stream, address, record.value);
    Words& words = event.place.words();
    if (result != CUDA_SUCCESS) {
        event.made[record.counter] = {};
        words.counters[record.counter].replace({record.value, getpid()},
                                               {record.value - 1, getpid()});
        log::note("a record of an interprocess event: %s", error_name(result));
        return result;
    }
    event.recorded_here(record);
    words.publish(record);
    return CUDA_SUCCESS;
}

template <class Native>
CUresult record(CUevent handle, CUstream stream, bool external, bool per_thread, Native native) {
    const gate::Pass pass;
    const EventPtr event = find(handle);
    if (!event) return native();
    const StreamCalls calls{per_thread};
    if (calls.capturing(stream)) {
        if (external) return refuse("a node that records");
        const CUresult result = native();
        if (result == CUDA_SUCCESS) event->captured_here();
        return result;
    }
    const std::lock_guard order(event->recording);
    const CUresult result = native();
    return result == CUDA_SUCCESS ? tell(*event, stream, calls) : result;
}

template <class Native>
CUresult wait(CUstream stream, CUevent handle, unsigned flags, bool per_thread, Native native) {
    const gate::Pass pass;
    const EventPtr event = find(handle);
    if (!event || (flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL})) return native();
    const StreamCalls calls{per_thread};
    const bool capturing = calls.capturing(stream);
    if (capturing && flags) return refuse("a node that waits");
    Record latest;
    if (!event->is_remote(&latest)) return native();
    // As the driver says of any event that was recorded outside of the capture.
    if (capturing) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    const int device = calls.device_of(stream);
    if (device < 0) return native();  // no such stream: the driver says so
    if (event->place.words().has_reached(latest)) return CUDA_SUCCESS;
    const CUresult result = event_words::allow(event->place.address, device);
    return result == CUDA_SUCCESS
               ? calls.wait(stream, event->place.address_of(latest), latest.value)
               : result;
}

// For waits that no stream names: what a peer's device is still to reach cannot be waited for.
template <class Native>
CUresult wait_in_context(CUevent handle, const char* call, Native native) {
    const gate::Pass pass;
    const EventPtr event = find(handle);
    Record latest;
    return event && event->is_remote(&latest) && !event->place.words().has_reached(latest)
               ? refuse(call)
               : native();
}

// Gives back the words of an event that has ended; one with a context ends without a call.
void forget(const EventPtr& event) {
    if (event && event->own) event_words::give_back(event->place);
}

// Makes the event that the driver sees. Takes over the words if they are the process's own.
CUresult make(CUevent* handle, const Place& place, bool own, unsigned flags) {
    const CUresult result = driver.cuEventCreate(handle, flags);
    if (result == CUDA_SUCCESS)
        forget(shared_events::put(*handle, std::make_shared<Event>(place, own)));
    else if (own)
        event_words::give_back(place);
    return result;
}

// The driver's own event: nobody can save a process that shares it.
CUresult native(CUresult result, const char* reason) {
    if (result == CUDA_SUCCESS) mark_unsupported(Reason::legacy_ipc, reason);
    return result;
}

CUresult destroy(CUevent handle, CUresult (*end)(CUevent)) {
    // Taken out first: once it has ended, another thread may get the same handle for a new event.
    EventPtr event = shared_events::take_out(handle);
    if (!event) return end(handle);
    const gate::Pass pass;
    const CUresult result = end(handle);
    if (result == CUDA_SUCCESS)
        forget(event);
    else
        shared_events::put(handle, std::move(event));
    return result;
}

// Returns whether a record of a peer's is reached; false while the words are parked.
bool has_reached(const Event& event, const Record& record) {
    const std::lock_guard lock(blocks::mutex);
    return event_words::readable(event.place.address) && event.place.words().has_reached(record);
}

// For calls that a closed gate does not hold, and which so may come while words are parked.
bool is_remote(const Event& event, Record* latest) {
    const std::lock_guard lock(blocks::mutex);
    return event_words::readable(event.place.address) && event.is_remote(latest);
}

}  // namespace

CUresult ipc_events::synchronize(CUevent handle) {
    const EventPtr event = find(handle);
    Record latest;
    if (!event || !is_remote(*event, &latest)) return driver.cuEventSynchronize(handle);
    for (long pause = kFirstPause; !has_reached(*event, latest);
         pause = std::min(2 * pause, kLongestPause))
        pause_for(pause);
    return CUDA_SUCCESS;
}

CUresult overrides::cuEventCreate(CUevent* handle, unsigned flags) {
    constexpr unsigned kShared = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
    if ((flags & kShared) == kShared && handle) {
        const gate::Pass pass;
        const RelaxedCapture relaxed;
        CUcontext context = nullptr;
        int device = 0;
        Place place;
        if (contexts::current(&context, &device)) {
            CUresult result = event_words::take(device, &place);
            if (result == CUDA_SUCCESS) {
                result = event_words::allow(place.address, device);
                if (result == CUDA_SUCCESS)
                    return make(handle, place, true, flags & ~unsigned{CU_EVENT_INTERPROCESS});
                event_words::give_back(place);
            }
            log::note("an interprocess event is left to the driver: %s", error_name(result));
        }
    }
    const CUresult result = driver.cuEventCreate(handle, flags);
    // An event that ended with its context may have had the same handle.
    const bool made = result == CUDA_SUCCESS && handle;
    if (const EventPtr gone = made ? shared_events::take_out(*handle) : nullptr) {
        const gate::Pass pass;
        forget(gone);
    }
    return result;
}

CUresult overrides::cuEventDestroy(CUevent event) {
    return destroy(event, driver.cuEventDestroy);
}
CUresult overrides::cuEventDestroy_v2(CUevent event) {
    return destroy(event, driver.cuEventDestroy_v2);
}

CUresult overrides::cuEventRecord(CUevent event, CUstream stream) {
    return record(event, stream, false, false, [&] { return driver.cuEventRecord(event, stream); });
}
CUresult overrides::cuEventRecord_ptsz(CUevent event, CUstream stream) {
    return record(event, stream, false, true,
                  [&] { return driver.cuEventRecord_ptsz(event, stream); });
}
CUresult overrides::cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    return record(event, stream, flags & CU_EVENT_RECORD_EXTERNAL, false,
                  [&] { return driver.cuEventRecordWithFlags(event, stream, flags); });
}
CUresult overrides::cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags) {
    return record(event, stream, flags & CU_EVENT_RECORD_EXTERNAL, true,
                  [&] { return driver.cuEventRecordWithFlags_ptsz(event, stream, flags); });
}

CUresult overrides::cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return wait(stream, event, flags, false,
                [&] { return driver.cuStreamWaitEvent(stream, event, flags); });
}
CUresult overrides::cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
    return wait(stream, event, flags, true,
                [&] { return driver.cuStreamWaitEvent_ptsz(stream, event, flags); });
}

// Not held at the gate: a closing gate may wait for what the program does next.
CUresult overrides::cuEventQuery(CUevent handle) {
    const CUresult result = driver.cuEventQuery(handle);
    const EventPtr event = find(handle);
    Record latest;
    // The driver knows of an older record only; and of what has gone wrong in the context.
    const bool answers = result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY;
    if (!event || !answers || !is_remote(*event, &latest)) return result;
    return has_reached(*event, latest) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult overrides::cuCtxRecordEvent(CUcontext context, CUevent event) {
    const gate::Pass pass;
    return find(event) ? refuse("cuCtxRecordEvent") : driver.cuCtxRecordEvent(context, event);
}
CUresult overrides::cuGreenCtxRecordEvent(CUgreenCtx context, CUevent event) {
    const gate::Pass pass;
    return find(event) ? refuse("cuGreenCtxRecordEvent")
                       : driver.cuGreenCtxRecordEvent(context, event);
}
CUresult overrides::cuCtxWaitEvent(CUcontext context, CUevent event) {
    return wait_in_context(event, "cuCtxWaitEvent",
                           [&] { return driver.cuCtxWaitEvent(context, event); });
}
CUresult overrides::cuGreenCtxWaitEvent(CUgreenCtx context, CUevent event) {
    return wait_in_context(event, "cuGreenCtxWaitEvent",
                           [&] { return driver.cuGreenCtxWaitEvent(context, event); });
}

CUresult overrides::cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event) {
    const gate::Pass pass;
    const EventPtr shared = find(event);
    if (!shared)
        return native(driver.cuIpcGetEventHandle(handle, event),
                      "the program shares events by legacy CUDA IPC, and with this driver the hook "
                      "cannot do that in its place");
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!shared->own) return CUDA_ERROR_INVALID_HANDLE;  // opened, not made with the flag
    const Place& place = shared->place;
    const std::lock_guard lock(blocks::mutex);
    const auto* mapping = blocks::find(place.address);
    if (!mapping) return CUDA_ERROR_INVALID_HANDLE;
    Ticket ticket = legacy_ipc::ticket(legacy_ipc::kEventMagic, *mapping->second.block,
                                       place.address - mapping->first, event_words::kStride);
    ticket.generation = place.generation;
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &ticket, sizeof ticket);
    return CUDA_SUCCESS;
}

CUresult overrides::cuIpcOpenEventHandle(CUevent* event, CUipcEventHandle handle) {
    Ticket ticket{};
    std::memcpy(&ticket, &handle, sizeof ticket);
    if (ticket.magic != legacy_ipc::kEventMagic) {
        const gate::Pass pass;
        return native(driver.cuIpcOpenEventHandle(event, handle),
                      "the program shares events by legacy CUDA IPC with a process that has no "
                      "hook");
    }
    if (!event) return CUDA_ERROR_INVALID_VALUE;
    if (ticket.size != event_words::kStride || ticket.offset % event_words::kStride)
        return CUDA_ERROR_INVALID_HANDLE;
    Place place;
    CUdeviceptr address = 0;
    CUresult result = legacy_ipc::open(ticket, &address);
    if (result != CUDA_SUCCESS) return result;
    place = {address, ticket.generation};
    const gate::Pass pass;
    const RelaxedCapture relaxed;
    if (place.words().record().generation != place.generation)
        return CUDA_ERROR_INVALID_HANDLE;  // the owner has destroyed the event
    CUcontext context = nullptr;
    int device = 0;
    if (!contexts::current(&context, &device)) return CUDA_ERROR_INVALID_CONTEXT;
    result = event_words::allow(address, device);
    return result == CUDA_SUCCESS ? make(event, place, false, CU_EVENT_DISABLE_TIMING) : result;
}

}  // namespace phos
