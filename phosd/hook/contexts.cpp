#include "contexts.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "cow.h"
#include "gate.h"
#include "heap.h"
#include "kernels.h"
#include "log.h"
#include "own.h"
#include "pool.h"

namespace phos {
namespace {

struct Context {
    int device;
    bool primary;
    CUevent event = nullptr;  // of the hook's own, recorded to see whether the context is idle
    bool recorded = false;
    bool idle = true;                // as it was found last
    CUresult answer = CUDA_SUCCESS;  // of the driver, when it was asked last
    uint64_t epoch = 0;
    size_t stack = 0;  // the limit to restore; 0 when it was not changed
};

// Stream and, for a per-thread stream, the thread.
using CaptureKey = std::pair<CUstream, long>;

std::mutex mutex;  // a capture begins, and a context is asked, only under it
std::map<CUcontext, Context> known;
std::set<CaptureKey> capturing;
std::atomic<uint32_t> captures_now{0};           // how many those are, to be had without the lock
std::map<std::pair<int, int>, int> peer_access;  // (accessing device, owning device) -> contexts

CaptureKey capture_key(CUstream stream, bool per_thread) {
    if (per_thread && !stream) stream = CU_STREAM_PER_THREAD;
    return {stream, stream == CU_STREAM_PER_THREAD ? syscall(SYS_gettid) : 0};
}

int device_of(CUcontext context) {
    const Current current(context);
    CUdevice device = -1;
    return current && driver.cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : -1;
}

void add(CUcontext context, bool primary) {
    const int device = device_of(context);
    const std::lock_guard lock(mutex);
    known.emplace(context, Context{device, primary});
}

void forget(CUcontext context) {
    {
        const std::lock_guard lock(mutex);
        const auto found = known.find(context);
        if (found == known.end()) return;
        if (found->second.event) {
            const Current current(context);
            driver.cuEventDestroy_v2(found->second.event);
        }
        known.erase(found);
    }
    cow::context_ending(context);
    pool::context_ending(context);
}

void end_of(const CaptureKey& capture) {
    capturing.erase(capture);
    captures_now = static_cast<uint32_t>(capturing.size());
}

template <class Begin>
CUresult begin_capture(CUstream stream, bool per_thread, Begin begin) {
    const gate::Pass pass;
    const std::lock_guard lock(mutex);
    const CUresult result = begin();
    if (result == CUDA_SUCCESS) capturing.insert(capture_key(stream, per_thread));
    captures_now = static_cast<uint32_t>(capturing.size());
    return result;
}

// Not held at the gate: an end is what a closing gate waits for.
CUresult end_capture(CUstream stream, CUgraph* graph, bool per_thread) {
    const auto end = per_thread ? driver.cuStreamEndCapture_ptsz : driver.cuStreamEndCapture;
    const auto ask = per_thread && driver.cuStreamIsCapturing_ptsz ? driver.cuStreamIsCapturing_ptsz
                                                                   : driver.cuStreamIsCapturing;
    const CUresult result = end(stream, graph);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)
        return result;  // still capturing, e.g. ended by the wrong thread
    const std::lock_guard lock(mutex);
    end_of(capture_key(stream, per_thread));
    return result;
}

CUresult destroy_stream(CUstream stream, CUresult (*destroy)(CUstream)) {
    const CUresult result = destroy(stream);
    const std::lock_guard lock(mutex);
    if (result == CUDA_SUCCESS) end_of(capture_key(stream, false));
    return result;
}

template <class Create>
CUresult create_context(CUcontext* context, bool primary, Create create) {
    const gate::Pass pass;
    const CUresult result = create();
    if (result == CUDA_SUCCESS && context) add(*context, primary);
    return result;
}

// The context's own memory is freed by the driver with it; the hook's memory for it, here.
CUresult destroy_context(CUcontext context, CUresult (*destroy)(CUcontext)) {
    const gate::Pass pass;
    forget(context);
    const CUresult result = destroy(context);
    pool::context_ended(context, result == CUDA_SUCCESS);
    kernels::forget_functions();
    if (result == CUDA_SUCCESS)
        heap::free_all_of(context);
    else if (context)
        add(context, false);
    return result;
}

CUresult end_primary(CUdevice device, CUresult (*end)(CUdevice)) {
    const gate::Pass pass;
    CUcontext primary = nullptr;
    {
        const std::lock_guard lock(mutex);
        for (const auto& [context, state] : known)
            if (state.device == device && state.primary) primary = context;
    }
    if (primary) forget(primary);
    const CUresult result = end(device);
    kernels::forget_functions();
    unsigned flags = 0;
    int active = 1;
    const bool gone = driver.cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS &&
                      result == CUDA_SUCCESS && !active;
    if (!primary) return result;
    const bool ended = gone || (result == CUDA_SUCCESS && end != driver.cuDevicePrimaryCtxRelease &&
                                end != driver.cuDevicePrimaryCtxRelease_v2);
    pool::context_ended(primary, ended);
    if (ended) heap::free_all_of(primary);
    if (!gone) add(primary, true);
    return result;
}

// Whether the error is one after which nothing runs in the context any more.
bool has_ended(CUresult error) {
    switch (error) {
        case CUDA_ERROR_DEINITIALIZED:
        case CUDA_ERROR_INVALID_CONTEXT:
        case CUDA_ERROR_CONTEXT_IS_DESTROYED:
        case CUDA_ERROR_ECC_UNCORRECTABLE:
        case CUDA_ERROR_NVLINK_UNCORRECTABLE:
        case CUDA_ERROR_CONTAINED:
        case CUDA_ERROR_ILLEGAL_ADDRESS:
        case CUDA_ERROR_LAUNCH_TIMEOUT:
        case CUDA_ERROR_ASSERT:
        case CUDA_ERROR_HARDWARE_STACK_ERROR:
        case CUDA_ERROR_ILLEGAL_INSTRUCTION:
        case CUDA_ERROR_MISALIGNED_ADDRESS:
        case CUDA_ERROR_INVALID_ADDRESS_SPACE:
        case CUDA_ERROR_INVALID_PC:
        case CUDA_ERROR_LAUNCH_FAILED:
        case CUDA_ERROR_TENSOR_MEMORY_LEAK:
            return true;
        default:
            return false;
    }
}

// CUDA_SUCCESS when all that was submitted to the context before `state.epoch` is done. Any other
// answer but those of has_ended() tells nothing, or that it is not done.
CUresult ask(CUcontext context, Context& state, uint64_t epoch) {
    const Current current(context);
    if (!current) return current.result();
    if (!state.event) {
        const CUresult made = driver.cuEventCreate(&state.event, CU_EVENT_DISABLE_TIMING);
        if (made != CUDA_SUCCESS) return made;
    }
    if (!state.recorded) {
        const CUresult recorded = driver.cuCtxRecordEvent(context, state.event);
        if (recorded != CUDA_SUCCESS) return recorded;
        state.recorded = true;
        state.epoch = epoch;
    }
    return driver.cuEventQuery(state.event);
}

CUresult change_peer(CUcontext peer, CUresult result, int change) {
    CUcontext context;
    int device;
    if (result != CUDA_SUCCESS || !contexts::current(&context, &device)) return result;
    const int owner = device_of(peer);
    bool changed = false;
    {
        const std::lock_guard lock(mutex);
        int& count = peer_access[{device, owner}];
        const bool before = count > 0;
        count = count + change < 0 ? 0 : count + change;
        changed = before != (count > 0);
    }
    if (changed) heap::set_peer_access(owner, device, change > 0);
    return result;
}

}  // namespace

namespace contexts {

Activity activity(uint64_t epoch) {
    const std::lock_guard lock(mutex);
    if (!capturing.empty()) return Activity::capturing;
    bool busy = false;
    for (auto& [context, state] : known) {
        const CUresult answer = ask(context, state, epoch);
        if (answer != std::exchange(state.answer, answer) && answer != CUDA_SUCCESS &&
            answer != CUDA_ERROR_NOT_READY)
            log::note("whether a context of device %d is idle: %s", state.device,
                      error_name(answer));
        state.idle = answer == CUDA_SUCCESS || has_ended(answer);
        if (state.idle) state.recorded = false;
        // Done, but more may have come since: ask again. And what cannot be asked may be at work.
        if (!state.idle || (answer == CUDA_SUCCESS && state.epoch != epoch)) busy = true;
    }
    return busy ? Activity::busy : Activity::idle;
}

void release_stacks() {
    const std::lock_guard lock(mutex);
    for (auto& [context, state] : known) {
        const Current current(context);
        size_t limit = 0;
        if (!current || driver.cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE) != CUDA_SUCCESS) continue;
        if (driver.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0) == CUDA_SUCCESS) state.stack = limit;
    }
}

void restore_stacks() {
    const std::lock_guard lock(mutex);
    for (auto& [context, state] : known) {
        if (!state.stack) continue;
        const Current current(context);
        const CUresult result = driver.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, state.stack);
        if (result != CUDA_SUCCESS)  // the driver enlarges stacks at a launch that needs more
            log::note("setting the stack limit back to %zu: %s", state.stack, error_name(result));
        state.stack = 0;
    }
}

bool is_idle(CUcontext context) {
    const std::lock_guard lock(mutex);
    const auto found = known.find(context);
    return found != known.end() && found->second.idle;
}

uint32_t captures() {
    return captures_now.load(std::memory_order_acquire);
}

CUresult unforbidden() {
    return captures() ? driver.cuMemFree_v2(0) : CUDA_SUCCESS;
}

CUresult synchronize() {
    if (!captures()) return driver.cuCtxSynchronize();
    // Which would end a capture in the context whatever its mode. To free any of the driver's own
    // memory waits for the device just as well.
    CUdeviceptr memory = 0;
    const CUresult result = driver.cuMemAlloc_v2(&memory, 1);
    return result == CUDA_SUCCESS ? driver.cuMemFree_v2(memory) : result;
}

bool current(CUcontext* context, int* device) {
    CUdevice found = 0;
    if (driver.cuCtxGetCurrent(context) != CUDA_SUCCESS || !*context ||
        driver.cuCtxGetDevice(&found) != CUDA_SUCCESS)
        return false;
    *device = found;
    return true;
}

CUcontext any_on(int device) {
    const std::lock_guard lock(mutex);
    for (const auto& [context, state] : known)
        if (state.device == device) return context;
    return nullptr;
}

std::vector<int> peers_of(int device) {
    const std::lock_guard lock(mutex);
    std::vector<int> peers;
    for (const auto& [pair, count] : peer_access)
        if (pair.second == device && count > 0 && pair.first != device) peers.push_back(pair.first);
    return peers;
}

}  // namespace contexts

CUresult own::cuCtxCreate(CUcontext* context, unsigned flags, CUdevice device) {
    return create_context(context, false,
                          [&] { return driver.cuCtxCreate(context, flags, device); });
}
CUresult own::cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
    return create_context(context, false,
                          [&] { return driver.cuCtxCreate_v2(context, flags, device); });
}
CUresult own::cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam* affinity, int count,
                             unsigned flags, CUdevice device) {
    return create_context(context, false, [&] {
        return driver.cuCtxCreate_v3(context, affinity, count, flags, device);
    });
}
CUresult own::cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* parameters, unsigned flags,
                             CUdevice device) {
    return create_context(
        context, false, [&] { return driver.cuCtxCreate_v4(context, parameters, flags, device); });
}
CUresult own::cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return create_context(context, true,
                          [&] { return driver.cuDevicePrimaryCtxRetain(context, device); });
}
CUresult own::cuCtxDestroy(CUcontext context) {
    return destroy_context(context, driver.cuCtxDestroy);
}
CUresult own::cuCtxDestroy_v2(CUcontext context) {
    return destroy_context(context, driver.cuCtxDestroy_v2);
}
CUresult own::cuDevicePrimaryCtxRelease(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxRelease);
}
CUresult own::cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxRelease_v2);
}
CUresult own::cuDevicePrimaryCtxReset(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxReset);
}
CUresult own::cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return end_primary(device, driver.cuDevicePrimaryCtxReset_v2);
}
CUresult own::cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    const gate::Pass pass;
    return change_peer(peer, driver.cuCtxEnablePeerAccess(peer, flags), 1);
}
CUresult own::cuCtxDisablePeerAccess(CUcontext peer) {
    const gate::Pass pass;
    return change_peer(peer, driver.cuCtxDisablePeerAccess(peer), -1);
}

CUresult own::cuStreamBeginCapture(CUstream stream) {
    return begin_capture(stream, false, [&] { return driver.cuStreamBeginCapture(stream); });
}
CUresult own::cuStreamBeginCapture_ptsz(CUstream stream) {
    return begin_capture(stream, true, [&] { return driver.cuStreamBeginCapture_ptsz(stream); });
}
CUresult own::cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return begin_capture(stream, false,
                         [&] { return driver.cuStreamBeginCapture_v2(stream, mode); });
}
CUresult own::cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    return begin_capture(stream, true,
                         [&] { return driver.cuStreamBeginCapture_v2_ptsz(stream, mode); });
}
CUresult own::cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                          const CUgraphEdgeData* edges, size_t count,
                                          CUstreamCaptureMode mode) {
    return begin_capture(stream, false, [&] {
        return driver.cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode);
    });
}
CUresult own::cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph,
                                               const CUgraphNode* nodes,
                                               const CUgraphEdgeData* edges, size_t count,
                                               CUstreamCaptureMode mode) {
    return begin_capture(stream, true, [&] {
        return driver.cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode);
    });
}
CUresult own::cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    return end_capture(stream, graph, false);
}
CUresult own::cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
    return end_capture(stream, graph, true);
}
CUresult own::cuStreamDestroy(CUstream stream) {
    return destroy_stream(stream, driver.cuStreamDestroy);
}
CUresult own::cuStreamDestroy_v2(CUstream stream) {
    return destroy_stream(stream, driver.cuStreamDestroy_v2);
}

}  // namespace phos
