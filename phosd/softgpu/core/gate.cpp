#include "core/gate.h"

namespace phos::softgpu {

void Gate::wait_until_open() {
    while (true) {
        leave();
        {
            std::unique_lock lock(mutex_);
            condition_.wait(lock, [this] { return !closed_.load(); });
        }
        calls_.fetch_add(1);
        if (!closed_.load()) return;
    }
}

void Gate::changed() {
    std::lock_guard lock(mutex_);
    condition_.notify_all();
}

bool Gate::close(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    closed_.store(true);
    const auto idle = [this] { return calls_.load() == 0 && work_.load() == 0; };
    if (limit.count() == 0) {
        condition_.wait(lock, idle);
        return true;
    }
    // The system clock would jump with the time of day; wait_for counts on the steady one.
    if (condition_.wait_for(lock, limit, idle)) return true;
    closed_.store(false);
    condition_.notify_all();
    return false;
}

void Gate::open() {
    std::lock_guard lock(mutex_);
    closed_.store(false);
    condition_.notify_all();
}

}  // namespace phos::softgpu
