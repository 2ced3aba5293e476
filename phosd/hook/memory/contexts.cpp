#include "memory/contexts.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/process.h"

namespace phos::contexts {

std::mutex mutex;

namespace {

struct Context {
    int device;
    bool primary;
    CUevent event = nullptr;  // the hook's, recorded to see whether the context is idle
    bool recorded = false;
    uint64_t recorded_at = 0;
    bool idle = true;                // when it was last asked
    CUresult answer = CUDA_SUCCESS;  // the driver's last answer
    uint64_t epoch = 0;
    size_t stack = 0;  // the limit to restore; 0 if it was not changed
};

// A stream and, for a per-thread stream, the thread.
using CaptureKey = std::pair<CUstream, long>;

std::map<CUcontext, Context> known;
std::set<CaptureKey> capturing;
std::atomic<uint32_t> captures_now{0};           // their number, readable without the lock
std::map<std::pair<int, int>, int> peer_access;  // (accessing device, owning device) -> contexts

CaptureKey capture_key(CUstream stream, bool per_thread) {
    if (per_thread && !stream) stream = CU_STREAM_PER_THREAD;
    return {stream, stream == CU_STREAM_PER_THREAD ? syscall(SYS_gettid) : 0};
}

// Returns whether nothing runs in the context any more after this error.
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

// Returns CUDA_SUCCESS if all work submitted to the context before `state.epoch` is done. Errors
// for which has_ended() is false mean that it is unfinished or unknown.
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
        state.recorded_at = monotonic_ns();
        state.epoch = epoch;
    }
    return driver.cuEventQuery(state.event);
}

}  // namespace

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

bool forget(CUcontext context) {
    const std::lock_guard lock(mutex);
    const auto found = known.find(context);
    if (found == known.end()) return false;
    if (found->second.event) {
        const Current current(context);
        driver.cuEventDestroy_v2(found->second.event);
    }
    known.erase(found);
    return true;
}

CUcontext primary_on(int device) {
    const std::lock_guard lock(mutex);
    CUcontext primary = nullptr;
    for (const auto& [context, state] : known)
        if (state.device == device && state.primary) primary = context;
    return primary;
}

void capture_began(CUstream stream, bool per_thread) {
    capturing.insert(capture_key(stream, per_thread));
    captures_now = static_cast<uint32_t>(capturing.size());
}

void capture_ended(CUstream stream, bool per_thread) {
    capturing.erase(capture_key(stream, per_thread));
    captures_now = static_cast<uint32_t>(capturing.size());
}

bool count_peer(int accessor, int owner, int change) {
    const std::lock_guard lock(mutex);
    int& count = peer_access[{accessor, owner}];
    const bool before = count > 0;
    count = count + change < 0 ? 0 : count + change;
    return before != (count > 0);
}

Activity activity(uint64_t epoch) {
    const std::lock_guard lock(mutex);
    if (!capturing.empty()) return Activity::capturing;
    Activity found = Activity::idle;
    for (auto& [context, state] : known) {
        const CUresult answer = ask(context, state, epoch);
        if (answer != std::exchange(state.answer, answer) && answer != CUDA_SUCCESS &&
            answer != CUDA_ERROR_NOT_READY)
            log::note("whether a context of device %d is idle: %s", state.device,
                      error_name(answer));
        state.idle = answer == CUDA_SUCCESS || has_ended(answer);
        if (state.idle) state.recorded = false;
        if (!state.idle)  // contexts that cannot be asked may have work
            found = Activity::busy;
        else if (answer == CUDA_SUCCESS && state.epoch != epoch && found == Activity::idle)
            found = Activity::unknown;
    }
    return found;
}

Activity known_activity() {
    const std::lock_guard lock(mutex);
    return capturing.empty() ? Activity::unknown : Activity::capturing;
}

uint64_t unfinished_since() {
    const std::lock_guard lock(mutex);
    uint64_t since = 0;
    for (const auto& [context, state] : known)
        if (state.recorded && (!since || state.recorded_at < since) &&
            driver.cuEventQuery(state.event) == CUDA_ERROR_NOT_READY)
            since = state.recorded_at;
    return since;
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

CUresult capture_permits() {
    return captures() ? driver.cuMemFree_v2(0) : CUDA_SUCCESS;
}

CUresult synchronize() {
    if (!captures()) return driver.cuCtxSynchronize();
    // cuCtxSynchronize would invalidate a capture in the context, whatever its mode. Freeing
    // driver memory waits for the device just as well.
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

}  // namespace phos::contexts
