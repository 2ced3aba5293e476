// What the driver's checkpoint API does inside the process that it is asked for.
#pragma once

#include <cuda.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "core/control.h"
#include "core/memory.h"
#include "core/runtime.h"

namespace phos::softgpu {

class Checkpoint {
  public:
    static Checkpoint& instance();

    // Runs on the control thread. Throws what the call answers.
    ControlReply handle(const ControlRequest& request);

  private:
    // RUNNING -lock-> LOCKED -checkpoint-> CHECKPOINTED -restore-> LOCKED -unlock-> RUNNING
    void lock(std::chrono::milliseconds limit);
    void checkpoint();
    void restore(const ControlRequest& request);
    void unlock();
    void need(CUprocessState state) const;

    CUprocessState state_ = CU_PROCESS_STATE_RUNNING;
    bool lost_ = false;  // a restore has failed
    bool lacked_room_ = false;
    // The machine's GPUs, also those that the process does not see.
    std::vector<CUuuid> known_ = runtime().config().gpu_uuids();
    std::vector<std::shared_ptr<Memory>> saved_;
};

}  // namespace phos::softgpu
