// The driver's checkpoint API: called by one process, done by another (core/control.h).
#include <algorithm>

#include "api/api.h"
#include "core/control.h"

using namespace phos::softgpu;

namespace {

using Operation = ControlRequest::Operation;

// The caller needs the software GPU, but not its gate: a locked process may ask, too.
int32_t request(int pid, ControlRequest request) {
    require(initialized() && !forked(), CUDA_ERROR_NOT_INITIALIZED);
    const ControlReply reply = ask(pid, request);
    require(reply.result == CUDA_SUCCESS, reply.result);
    return reply.value;
}

template <typename Array>
bool zero(const Array& reserved) {
    return std::all_of(std::begin(reserved), std::end(reserved),
                       [](auto value) { return value == 0; });
}

}  // namespace

ANYTIME_API(cuCheckpointProcessGetRestoreThreadId, (int pid, int* thread), (pid, thread)) {
    require(thread != nullptr);
    require(initialized() && !forked(), CUDA_ERROR_NOT_INITIALIZED);
    *thread = thread_of(pid);
}

ANYTIME_API(cuCheckpointProcessGetState, (int pid, CUprocessState* state), (pid, state)) {
    require(state != nullptr);
    *state = static_cast<CUprocessState>(request(pid, {Operation::state}));
}

ANYTIME_API(cuCheckpointProcessLock, (int pid, CUcheckpointLockArgs* arguments), (pid, arguments)) {
    require(!arguments || (arguments->reserved0 == 0 && zero(arguments->reserved1)));
    request(pid, {Operation::lock, arguments ? arguments->timeoutMs : 0});
}

ANYTIME_API(cuCheckpointProcessCheckpoint, (int pid, CUcheckpointCheckpointArgs* arguments),
            (pid, arguments)) {
    require(!arguments || zero(arguments->reserved));
    request(pid, {Operation::checkpoint});
}

ANYTIME_API(cuCheckpointProcessRestore, (int pid, CUcheckpointRestoreArgs* arguments),
            (pid, arguments)) {
    require(initialized() && !forked(), CUDA_ERROR_NOT_INITIALIZED);
    ControlRequest restore{Operation::restore};
    const std::vector<CUuuid> gpus = runtime().config().gpu_uuids();
    restore.gpu_count = static_cast<uint32_t>(gpus.size());
    std::copy(gpus.begin(), gpus.end(), restore.gpus);
    if (arguments) {
        require(zero(arguments->reserved) && arguments->reserved1 == 0);
        require(arguments->gpuPairsCount <= kMaxGpus &&
                (arguments->gpuPairsCount == 0 || arguments->gpuPairs != nullptr));
        restore.pair_count = arguments->gpuPairsCount;
        std::copy_n(arguments->gpuPairs, restore.pair_count, restore.pairs);
    }
    request(pid, restore);
}

ANYTIME_API(cuCheckpointProcessUnlock, (int pid, CUcheckpointUnlockArgs* arguments),
            (pid, arguments)) {
    require(!arguments || zero(arguments->reserved));
    request(pid, {Operation::unlock});
}
