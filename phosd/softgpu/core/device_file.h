// A device that the process has open while it uses the GPU, as it has NVIDIA's: CUDA maps it, too,
// and NVML does not.
//
// A child that the process forks has both as well, and keeps them when the driver's
// checkpoint of the parent gives them up (H200, 580.159).
#pragma once

#include <string>

#include "core/descriptor.h"

namespace phos::softgpu {

class DeviceFile {
  public:
    explicit DeviceFile(bool mapped) : mapped_(mapped) {}

    // Opens the device at `path`; without one it is taken, and nothing is opened. Throws
    // CUDA_ERROR_OPERATING_SYSTEM.
    void take(const std::string& path);
    void give_up();
    bool taken() const { return taken_; }

    // For the driver's checkpoint: gives up what is taken, and takes that again.
    void suspend();
    void resume();

  private:
    const bool mapped_;
    bool taken_ = false;
    std::string path_;
    Descriptor file_;
    void* mapping_ = nullptr;
};

}  // namespace phos::softgpu
