#include "core/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
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
constexpr const char* kKinds[] = {"kernel", "copy", "fill", "write"};

long long nanoseconds(std::chrono::steady_clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// [[begin, end], ...], merged, in order.
std::string text_of(std::vector<std::pair<uint64_t, uint64_t>> ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::string text;
    for (size_t i = 0; i < ranges.size();) {
        auto [begin, end] = ranges[i];
        while (++i < ranges.size() && ranges[i].first <= end) end = std::max(end, ranges[i].second);
        text +=
            (text.empty() ? "[" : ",[") + std::to_string(begin) + "," + std::to_string(end) + "]";
    }
    return "[" + text + "]";
}

}  // namespace

// One bit a byte, page by page. Pages are spread over locks so that threads seldom meet.
class TraceEntry::Recorder final : public ptx::AccessTrace {
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

    std::vector<Range> ranges(bool write) const {
        std::vector<Range> found;
        for (const Shard& shard : shards_)
            for (const auto& [page, bits] : shard.pages[write])
                for (size_t i = 0; i < kPage; ++i) {
                    if (!bits[i]) continue;
                    const size_t begin = i;
                    while (i < kPage && bits[i]) ++i;
                    const uint64_t start = page << kPageShift;
                    found.emplace_back(start + begin, start + i);
                }
        return found;
    }

  private:
    struct Shard {
        std::mutex mutex;
        std::map<uint64_t, std::bitset<kPage>> pages[2];
    };
    std::array<Shard, 16> shards_;
};

TraceEntry::TraceEntry(Kind kind, const std::string& kernel)
    : kind_(kind),
      on_(!runtime().config().trace.empty()),
      start_(std::chrono::steady_clock::now()),
      kernel_(kernel) {
    if (on_ && kind == Kind::kernel) recorder_ = std::make_unique<Recorder>();
}

ptx::AccessTrace* TraceEntry::recorder() const {
    return recorder_.get();
}

void TraceEntry::add(uint64_t address, size_t bytes, bool write) {
    if (on_ && bytes) ranges_[write].emplace_back(address, address + bytes);
}

TraceEntry::~TraceEntry() {
    if (!on_) return;
    if (recorder_)
        for (const bool write : {false, true}) ranges_[write] = recorder_->ranges(write);
    std::string line = std::string("{\"kind\": \"") + kKinds[static_cast<size_t>(kind_)] + "\"";
    // Names of kernels are identifiers: nothing in them needs escaping.
    if (kind_ == Kind::kernel) line += ", \"kernel\": \"" + kernel_ + "\"";
    line += ", \"read\": " + text_of(std::move(ranges_[0])) +
            ", \"written\": " + text_of(std::move(ranges_[1])) +
            ", \"pid\": " + std::to_string(getpid()) +
            ", \"stream\": " + std::to_string(this_thread().stream) +
            ", \"start\": " + std::to_string(nanoseconds(start_)) +
            ", \"end\": " + std::to_string(nanoseconds(std::chrono::steady_clock::now())) + "}\n";
    // Opened for each line: a checkpoint must not find it.
    const Descriptor file(
        open(runtime().config().trace.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644));
    if (!file || write(file.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
        explain("cannot write the access trace to " + runtime().config().trace);
}

}  // namespace phos::softgpu
