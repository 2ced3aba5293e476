#include "core/stream.h"

#include <pthread.h>

#include <thread>

#include "core/context.h"
#include "core/error.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

uint64_t next_stream_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

}  // namespace

CUgraphNodeType Work::node_type() const {
    fail(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void Timeline::wait(uint64_t number) {
    if (reached(number)) return;
    std::unique_lock lock(mutex_);
    condition_.wait(lock, [&] { return reached(number); });
}

void Timeline::advance() {
    std::lock_guard lock(mutex_);
    done_.fetch_add(1, std::memory_order_release);
    condition_.notify_all();
}

Stream::Stream(Context& context_, Kind kind_, unsigned flags_, int priority_)
    : context(context_), kind(kind_), flags(flags_), priority(priority_), id(next_stream_id()) {}

Mark Stream::push(WorkPtr work, std::vector<Mark> after) {
    std::lock_guard lock(mutex_);
    runtime().gate().work_begins();
    queue_.push_back({std::move(work), std::move(after)});
    if (!started_) {
        started_ = true;
        std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
    condition_.notify_one();
    return {timeline_, ++submitted_};
}

Mark Stream::tail() const {
    std::lock_guard lock(mutex_);
    return {timeline_, submitted_};
}

void Stream::close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    condition_.notify_one();
}

void Stream::run() {
    pthread_setname_np(pthread_self(), "phos-stream");
    this_thread().stream = id;
    const ContextPtr alive = context.shared_from_this();
    while (true) {
        Item item;
        {
            std::unique_lock lock(mutex_);
            condition_.wait(lock, [this] { return closed_ || !queue_.empty(); });
            if (queue_.empty()) return;
            item = std::move(queue_.front());
            queue_.pop_front();
        }
        for (const Mark& mark : item.after) mark.wait();
        context.execute(*item.work);
        item = {};  // a graph or buffer ends before the work counts as complete
        timeline_->advance();
        runtime().gate().work_ends();
    }
}

}  // namespace phos::softgpu
