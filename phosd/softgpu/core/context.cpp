#include "core/context.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/error.h"
#include "core/runtime.h"
#include "core/work.h"

namespace phos::softgpu {
namespace {

uint64_t next_context_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

}  // namespace

Context::Context(int device_, unsigned flags_, bool primary_)
    : device(device_),
      primary(primary_),
      id(next_context_id()),
      flags(flags_),
      limits{{CU_LIMIT_STACK_SIZE, 1024},
             {CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20},
             {CU_LIMIT_MALLOC_HEAP_SIZE, 8 << 20},
             {CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 2},
             {CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 2048},
             {CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 128},
             {CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 0}},
      legacy_(std::make_shared<Stream>(*this, Stream::Kind::legacy, 0, 0)) {}

StreamPtr Context::create_stream(Stream::Kind kind, unsigned stream_flags, int priority) {
    auto stream = std::make_shared<Stream>(*this, kind, stream_flags, priority);
    std::lock_guard lock(mutex_);
    streams_.insert(stream);
    return stream;
}

StreamPtr Context::recorder() {
    std::lock_guard lock(mutex_);
    if (!recorder_) {
        recorder_ =
            std::make_shared<Stream>(*this, Stream::Kind::created, CU_STREAM_NON_BLOCKING, 0);
        streams_.insert(recorder_);
    }
    return recorder_;
}

void Context::remove_stream(const StreamPtr& stream) {
    std::lock_guard lock(mutex_);
    leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(),
                                  [](const Mark& mark) { return mark.reached(); }),
                   leaving_.end());
    if (!stream->idle()) leaving_.push_back(stream->tail());
    // Legacy work that comes later still follows what is in it.
    if (stream->blocking() && !stream->idle())
        legacy_->push(std::make_shared<Nothing>(), {stream->tail()});
    stream->close();
    streams_.erase(stream);
}

std::vector<Mark> Context::order(const Stream& stream) const {
    std::vector<Mark> after;
    const auto add = [&](Mark mark) {
        if (!mark.reached()) after.push_back(std::move(mark));
    };
    for (const Mark& barrier : barriers_) add(barrier);
    if (&stream != legacy_.get()) {
        if (stream.blocking()) add(legacy_->tail());
        return after;
    }
    for (const StreamPtr& other : streams_)
        if (other->blocking()) add(other->tail());
    return after;
}

std::unique_lock<std::recursive_mutex> Context::keep_submissions_out() {
    return std::unique_lock(submissions_);
}

Mark Context::submit(Stream& stream, WorkPtr work, std::vector<Mark> after) {
    std::lock_guard turn(submissions_);
    std::lock_guard lock(mutex_);
    for (Mark& mark : order(stream)) after.push_back(std::move(mark));
    return stream.push(std::move(work), std::move(after));
}

void Context::wait_everywhere(const Mark& mark) {
    std::lock_guard lock(mutex_);
    barriers_.erase(std::remove_if(barriers_.begin(), barriers_.end(),
                                   [](const Mark& barrier) { return barrier.reached(); }),
                    barriers_.end());
    barriers_.push_back(mark);
}

void Context::synchronize(Stream& stream) {
    std::vector<Mark> marks;
    {
        std::lock_guard lock(mutex_);
        marks = order(stream);
        marks.push_back(stream.tail());
    }
    for (const Mark& mark : marks) mark.wait();
    check();
}

std::vector<Mark> Context::tails() const {
    std::lock_guard lock(mutex_);
    std::vector<Mark> marks = barriers_;
    marks.insert(marks.end(), leaving_.begin(), leaving_.end());
    marks.push_back(legacy_->tail());
    for (const StreamPtr& stream : streams_) marks.push_back(stream->tail());
    return marks;
}

void Context::synchronize() {
    for (const Mark& mark : tails()) mark.wait();
    check();
}

bool Context::idle(Stream& stream) {
    std::lock_guard lock(mutex_);
    return stream.idle() && order(stream).empty();
}

void Context::execute(const Work& work) {
    if (broken() != CUDA_SUCCESS && !work.always()) return;
    if (const double latency = runtime().config().latency; latency > 0)
        std::this_thread::sleep_for(std::chrono::duration<double>(latency));
    if (const CUresult result = work.run(*this); result != CUDA_SUCCESS) break_with(result);
}

void Context::break_with(CUresult code) {
    CUresult none = CUDA_SUCCESS;
    broken_.compare_exchange_strong(none, code);
}

void Context::check() const {
    require(broken() == CUDA_SUCCESS, broken());
}

void Context::close() {
    for (const Mark& mark : tails()) mark.wait();
    std::lock_guard lock(mutex_);
    for (const StreamPtr& stream : streams_) stream->close();
    legacy_->close();
    streams_.clear();
}

}  // namespace phos::softgpu
