// The door for other processes: cuCheckpointProcess* reach a process through a thread of it that
// listens on an abstract unix socket named after its pid. Nothing of it is on disk, and no
// connection stays open between two requests, so CRIU meets only a listening socket.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/identity.h"

namespace phos::softgpu {

struct ControlRequest {
    enum class Operation : uint32_t { state, lock, checkpoint, restore, unlock };
    Operation operation;
    uint32_t timeout_ms = 0;
    uint32_t pair_count = 0;
    uint32_t gpu_count = 0;
    CUcheckpointGpuPair pairs[kMaxGpus] = {};
    // The machine's GPUs, as the caller knows them: a restored process knows those of the machine
    // that it was saved on.
    CUuuid gpus[kMaxGpus] = {};
};

struct ControlReply {
    CUresult result;
    int32_t value;
};

// Makes the socket and the thread. Throws CUDA_ERROR_OPERATING_SYSTEM.
void start_control();
void close_control_in_child();

// Takes the token that is in the name of this process's socket. Whoever restores a copy beside the
// process gives it another name, and nothing else of the two may be confused.
void follow_control_name();

// The thread that does what the process `pid` is asked for. As the driver, it tells this also while
// the process is held by a tracer. Throws as ask().
int thread_of(int pid);

// Asks the process `pid`. Throws CUDA_ERROR_OPERATING_SYSTEM when there is none,
// CUDA_ERROR_NOT_INITIALIZED when it has no software GPU, and CUDA_ERROR_NOT_PERMITTED when it
// belongs to another user or ends.
ControlReply ask(int pid, const ControlRequest& request);

}  // namespace phos::softgpu
