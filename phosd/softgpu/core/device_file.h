// A device that the process has open and mapped while it uses the GPU, as it has NVIDIA's.
//
// A child that the process forks has both as well, and keeps them when the driver's
// checkpoint of the parent gives them up (H200, 580.159).
#pragma once

#include <string>

#include "core/descriptor.h"

namespace phos::softgpu {

class DeviceFile {
  public:
    // Opens and maps the device at `path`; does nothing for an empty one. Throws
    // CUDA_ERROR_OPERATING_SYSTEM.
    void take(const std::string& path);
    void give_up();

  private:
    Descriptor file_;
    void* mapping_ = nullptr;
};

}  // namespace phos::softgpu
