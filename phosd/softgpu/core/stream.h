// Streams: work in order, each on a thread of its own, and the marks by which they wait for
// one another.
#pragma once

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace phos::softgpu {

class Context;
struct Capture;
struct Node;

// How far a stream has come: work is numbered from 1 in order of submission.
class Timeline {
  public:
    bool reached(uint64_t number) const { return done_.load(std::memory_order_acquire) >= number; }
    void wait(uint64_t number);
    void advance();  // the next piece of work is complete

  private:
    std::atomic<uint64_t> done_{0};
    std::mutex mutex_;
    std::condition_variable condition_;
};

// A point in a stream. An empty mark has been reached.
struct Mark {
    std::shared_ptr<Timeline> timeline;
    uint64_t number = 0;
    bool reached() const { return !timeline || timeline->reached(number); }
    void wait() const {
        if (timeline) timeline->wait(number);
    }
};

// One operation. The same object runs in a stream and as a node of a graph, as often as wanted.
class Work {
  public:
    virtual ~Work() = default;
    // Runs on a stream's thread; `context` is the stream's. A result other than CUDA_SUCCESS
    // breaks the context.
    virtual CUresult run(Context& context) const = 0;
    // Whether it runs in a context that is broken: what others wait for does.
    virtual bool always() const { return false; }
    // What it is as a node of a graph. Throws CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED for work that
    // cannot be one.
    virtual CUgraphNodeType node_type() const;
};
using WorkPtr = std::shared_ptr<const Work>;

class Stream : public std::enable_shared_from_this<Stream> {
  public:
    enum class Kind { legacy, per_thread, created };
    Stream(Context& context, Kind kind, unsigned flags, int priority);

    // Adds work that starts once everything before it in the stream and every mark is reached.
    // Callers go through Context::submit, which adds the marks of the legacy stream's rules.
    Mark push(WorkPtr work, std::vector<Mark> after);
    Mark tail() const;
    bool idle() const { return tail().reached(); }
    // No more work comes; the thread ends when what there is has run.
    void close();

    Context& context;
    const Kind kind;
    const unsigned flags;  // CU_STREAM_NON_BLOCKING
    const int priority;
    const uint64_t id;
    CUsynchronizationPolicy synchronization = CU_SYNC_POLICY_AUTO;
    // Under the lock of capture.cpp.
    std::shared_ptr<Capture> capture;
    std::vector<Node*> next_nodes;  // what the next captured work depends on

    bool blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }

  private:
    struct Item {
        WorkPtr work;
        std::vector<Mark> after;
    };
    void run();

    mutable std::mutex mutex_;
    std::condition_variable condition_;
    std::deque<Item> queue_;
    std::shared_ptr<Timeline> timeline_ = std::make_shared<Timeline>();
    uint64_t submitted_ = 0;
    bool started_ = false;
    bool closed_ = false;
};
using StreamPtr = std::shared_ptr<Stream>;

}  // namespace phos::softgpu
