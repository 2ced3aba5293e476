// PHOS_SOFTGPU_TRACE: what each operation read and wrote, one JSON object a line.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ptx/machine.h"

namespace phos::softgpu {

// Collects the accesses of one operation; its end appends the line. Does nothing when tracing is
// off.
class TraceEntry {
  public:
    enum class Kind { kernel, copy, fill, write };
    explicit TraceEntry(Kind kind, const std::string& kernel = {});
    ~TraceEntry();

    // For what accesses memory thread by thread; null when tracing is off.
    ptx::AccessTrace* recorder() const;
    // For what accesses whole ranges. Pageable host memory does not concern the devices.
    void read(uint64_t address, size_t bytes) { add(address, bytes, false); }
    void wrote(uint64_t address, size_t bytes) { add(address, bytes, true); }

  private:
    class Recorder;
    using Range = std::pair<uint64_t, uint64_t>;  // [begin, end)
    void add(uint64_t address, size_t bytes, bool write);

    const Kind kind_;
    const bool on_;
    const std::chrono::steady_clock::time_point start_;
    const std::string kernel_;
    std::vector<Range> ranges_[2];  // by whether they were written
    std::unique_ptr<Recorder> recorder_;
};

}  // namespace phos::softgpu
