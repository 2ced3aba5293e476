// The interprocess events that the program has made or opened. To the driver each is a plain event
// of this process; what other processes must know of it is in its words.
#pragma once

#include <memory>
#include <mutex>

#include "memory/event_words.h"

namespace phos::shared_events {

// The driver's event is recorded along with the words, and tells all of what was recorded here.
struct Event {
    Event(const event_words::Place& place_, bool own_) : place(place_), own(own_) {}

    const event_words::Place place;
    const bool own;  // made here, not opened

    // Held from a promise until the device is to keep it, so that a stream keeps its promises in
    // order.
    std::mutex recording;
    struct {
        unsigned long long stream = 0;  // the driver's id, which is never used again; 0: unknown
        event_words::Promise promise;
    } made[event_words::kCounters];  // here last; guarded by `recording`

    // Sets the latest record, and returns whether another process made it. Needs words that may be
    // touched.
    bool is_remote(event_words::Record* latest) const;
    void recorded_here(const event_words::Record& record);
    void captured_here();

  private:
    mutable std::mutex mutex_;
    event_words::Record mine_;  // the latest of this process
    bool captured_ = false;     // it is in a capture, of which other processes know nothing
};
using EventPtr = std::shared_ptr<Event>;

// These take a lock of their own. Null if the event is a plain one.
EventPtr find(CUevent handle);
EventPtr put(CUevent handle, EventPtr event);  // returns the one that had this handle
EventPtr take_out(CUevent handle);

// For the hook's thread, again and again: lets work go on that waits for a process which has ended.
// Takes blocks::mutex.
void keep_promises_of_the_dead();

// Notes that a call is refused because it cannot be done with an interprocess event.
CUresult refuse(const char* call);

// Returns whether a graph may have a node that records or waits for this event, or one of these
// parameters. Each launch would have to promise another record, which no node can.
bool fit_for_graph(CUevent event);
bool fit_for_graph(const CUgraphNodeParams* parameters);

}  // namespace phos::shared_events
