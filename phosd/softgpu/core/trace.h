// PHOS_SOFTGPU_TRACE: what each launch read and wrote, one JSON object a line.
#pragma once

#include <memory>
#include <string>

#include "ptx/machine.h"

namespace phos::softgpu {

// Collects the accesses of one launch; its end appends the line. Does nothing when tracing is off.
class TraceFile {
  public:
    explicit TraceFile(std::string kernel);
    ~TraceFile();
    ptx::AccessTrace* recorder() const { return recorder_.get(); }

  private:
    std::string kernel_;
    std::unique_ptr<ptx::AccessTrace> recorder_;
};

}  // namespace phos::softgpu
