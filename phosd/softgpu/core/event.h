// Events: a mark in a stream, and the time at which it was reached.
#pragma once

#include <cuda.h>

#include <chrono>
#include <memory>
#include <mutex>

#include "core/stream.h"

namespace phos::softgpu {

struct Event {
    struct Record {
        Mark mark;
        std::chrono::steady_clock::time_point time;  // valid once the mark is reached
    };
    struct Captured;  // capture.h: recorded in a capture, the event stands for graph nodes

    Event(std::shared_ptr<Context> context_, unsigned flags_)
        : context(std::move(context_)), flags(flags_) {}

    const std::shared_ptr<Context> context;
    const unsigned flags;

    std::shared_ptr<Record> record() const {
        std::lock_guard lock(mutex_);
        return record_;
    }
    std::shared_ptr<Captured> captured() const {
        std::lock_guard lock(mutex_);
        return captured_;
    }
    void set(std::shared_ptr<Record> record, std::shared_ptr<Captured> captured) {
        std::lock_guard lock(mutex_);
        record_ = std::move(record);
        captured_ = std::move(captured);
    }

  private:
    mutable std::mutex mutex_;
    std::shared_ptr<Record> record_;
    std::shared_ptr<Captured> captured_;
};
using EventPtr = std::shared_ptr<Event>;

}  // namespace phos::softgpu
