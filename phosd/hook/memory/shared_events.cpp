#include "memory/shared_events.h"

#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "base/process.h"

namespace phos::shared_events {
namespace {

constexpr uint64_t kBetweenLooks = 500'000'000;  // nanoseconds

std::mutex mutex;
std::unordered_map<CUevent, EventPtr> events;  // guarded by `mutex`
std::atomic<size_t> known{0};                  // their number: most programs have none

bool none() {
    return __builtin_expect(!known.load(std::memory_order_acquire), 1);
}

}  // namespace

bool Event::is_remote(event_words::Record* latest) const {
    *latest = place.words().record();
    const std::lock_guard lock(mutex_);
    return latest->generation == place.generation && latest->any() && !captured_ &&
           !(*latest == mine_);
}

void Event::recorded_here(const event_words::Record& record) {
    const std::lock_guard lock(mutex_);
    mine_ = record;
    captured_ = false;
}

void Event::captured_here() {
    const std::lock_guard lock(mutex_);
    captured_ = true;
}

EventPtr find(CUevent handle) {
    if (none()) return nullptr;
    const std::lock_guard lock(mutex);
    const auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second;
}

EventPtr put(CUevent handle, EventPtr event) {
    const std::lock_guard lock(mutex);
    EventPtr before = std::exchange(events[handle], std::move(event));
    known.store(events.size(), std::memory_order_release);
    return before;
}

EventPtr take_out(CUevent handle) {
    if (none()) return nullptr;
    const std::lock_guard lock(mutex);
    const auto found = events.find(handle);
    if (found == events.end()) return nullptr;
    EventPtr event = std::move(found->second);
    events.erase(found);
    known.store(events.size(), std::memory_order_release);
    return event;
}

void keep_promises_of_the_dead() {
    static uint64_t next = 0;
    const uint64_t now = monotonic_ns();
    if (none() || now < next) return;
    next = now + kBetweenLooks;
    const std::scoped_lock lock(blocks::mutex, mutex);
    for (const auto& [handle, event] : events)
        if (event_words::readable(event->place.address))
            event->place.words().keep_promises_of_the_dead();
}

CUresult refuse(const char* call) {
    log::note("%s is refused for an interprocess event: other processes could not be told", call);
    return CUDA_ERROR_NOT_SUPPORTED;
}

bool fit_for_graph(CUevent event) {
    return !find(event) || refuse("a node of a graph") == CUDA_SUCCESS;
}

bool fit_for_graph(const CUgraphNodeParams* parameters) {
    if (none() || !parameters) return true;
    if (parameters->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD)
        return fit_for_graph(parameters->eventRecord.event);
    if (parameters->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT)
        return fit_for_graph(parameters->eventWait.event);
    return true;
}

}  // namespace phos::shared_events
