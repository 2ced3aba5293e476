#include "core/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <bitset>
#include <map>
#include <mutex>

#include "core/descriptor.h"
#include "core/error.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

constexpr unsigned kPageShift = 12;
constexpr size_t kPage = 1u << kPageShift;

// One bit a byte, page by page. Pages are spread over locks so that threads seldom meet.
class Recorder final : public ptx::AccessTrace {
  public:
    void record(uint64_t address, uint32_t bytes, bool write) override {
        for (uint64_t at = address; at < address + bytes;) {
            const uint64_t page = at >> kPageShift;
            const uint64_t end = std::min(address + bytes, (page + 1) << kPageShift);
            Shard& shard = shards_[page % shards_.size()];
            std::lock_guard lock(shard.mutex);
            auto& bits = shard.pages[write][page];
            for (; at < end; ++at) bits.set(at % kPage);
        }
    }

    // [[begin, end], ...], merged, in order.
    std::string ranges(bool write) const {
        std::map<uint64_t, const std::bitset<kPage>*> pages;
        for (const Shard& shard : shards_)
            for (const auto& [page, bits] : shard.pages[write]) pages[page] = &bits;
        std::string text;
        uint64_t begin = 0, end = 0;
        const auto flush = [&] {
            if (end > begin)
                text += (text.empty() ? "[" : ",[") + std::to_string(begin) + "," +
                        std::to_string(end) + "]";
        };
        for (const auto& [page, bits] : pages)
            for (size_t i = 0; i < kPage; ++i) {
                if (!bits->test(i)) continue;
                const uint64_t at = (page << kPageShift) + i;
                if (at != end) {
                    flush();
                    begin = at;
                }
                end = at + 1;
            }
        flush();
        return "[" + text + "]";
    }

  private:
    struct Shard {
        std::mutex mutex;
        std::map<uint64_t, std::bitset<kPage>> pages[2];
    };
    std::array<Shard, 16> shards_;
};

}  // namespace

TraceFile::TraceFile(std::string kernel) : kernel_(std::move(kernel)) {
    if (!runtime().config().trace.empty()) recorder_ = std::make_unique<Recorder>();
}

TraceFile::~TraceFile() {
    if (!recorder_) return;
    const auto& recorder = static_cast<const Recorder&>(*recorder_);
    // Names of kernels are identifiers: nothing in them needs escaping.
    const std::string line = "{\"kernel\": \"" + kernel_ +
                             "\", \"read\": " + recorder.ranges(false) +
                             ", \"written\": " + recorder.ranges(true) + "}\n";
    // Opened for each line: a checkpoint must not find it.
    const Descriptor file(
        open(runtime().config().trace.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644));
    if (!file || write(file.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
        explain("cannot write the access trace to " + runtime().config().trace);
}

}  // namespace phos::softgpu
