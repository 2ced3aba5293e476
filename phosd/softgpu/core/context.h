// Contexts: the streams, the sticky error and the flags that belong to one.
#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "core/stream.h"

namespace phos::softgpu {

class Context : public std::enable_shared_from_this<Context> {
  public:
    Context(int device, unsigned flags, bool primary);

    const int device;  // ordinal
    const bool primary;
    const uint64_t id;
    std::atomic<unsigned> flags;
    std::map<CUlimit, size_t> limits;
    CUfunc_cache cache_config = CU_FUNC_CACHE_PREFER_NONE;
    CUsharedconfig shared_config = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;

    StreamPtr legacy() const { return legacy_; }
    // Carries what follows all work of the context and holds up none of it, as on a GPU.
    StreamPtr recorder();
    StreamPtr create_stream(Stream::Kind kind, unsigned flags, int priority);
    void remove_stream(const StreamPtr& stream);

    // Orders work after what came before it in its stream, and by the legacy stream's rules:
    // legacy work follows all work of blocking streams, and theirs follows it.
    Mark submit(Stream& stream, WorkPtr work, std::vector<Mark> after = {});
    void wait_everywhere(const Mark& mark);  // all work to come, in every stream
    // For a copy or a free that waits for the device: until it returns, whoever submits work to the
    // context, or records an event, waits as well (docs/design/driver.md:
    // waiting-copies-hold-submissions). Queries do not.
    [[nodiscard]] std::unique_lock<std::recursive_mutex> keep_submissions_out();
    // Waits as cuStreamSynchronize and cuCtxSynchronize do.
    void synchronize(Stream& stream);
    void synchronize();
    bool idle(Stream& stream);
    // All that was submitted so far, and what all later work waits for.
    std::vector<Mark> tails() const;

    // Runs one operation on a stream's thread, unless the context is broken.
    void execute(const Work& work);
    CUresult broken() const { return broken_.load(); }
    void break_with(CUresult code);
    // Throws the sticky error.
    void check() const;

    std::atomic<bool> destroyed{false};

    // An end of the context: waits for its work, then frees what it owns.
    void close();

  private:
    std::vector<Mark> order(const Stream& stream) const;

    std::recursive_mutex submissions_;  // taken before mutex_
    mutable std::mutex mutex_;          // submission order over the context's streams
    std::set<StreamPtr> streams_;       // all but the legacy one
    StreamPtr legacy_;
    std::vector<Mark> barriers_;  // what all work to come waits for
    std::vector<Mark> leaving_;   // the last work of streams that were destroyed before it was done
    StreamPtr recorder_;          // one of streams_, made when it is needed
    std::atomic<CUresult> broken_{CUDA_SUCCESS};
};
using ContextPtr = std::shared_ptr<Context>;

}  // namespace phos::softgpu
