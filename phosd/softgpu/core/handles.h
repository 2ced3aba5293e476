// The handles that a program holds. A handle that is not in its table is refused, so a stale or
// invented one is an error and never a crash.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "core/error.h"

namespace phos::softgpu {

// `Handle` is the driver's opaque pointer type for a T.
template <typename Handle, typename T>
class Handles {
  public:
    Handle add(std::shared_ptr<T> object) {
        const auto handle = reinterpret_cast<Handle>(object.get());
        std::lock_guard lock(mutex_);
        objects_[handle] = std::move(object);
        return handle;
    }
    std::shared_ptr<T> find(Handle handle) const {
        std::shared_lock lock(mutex_);
        const auto found = objects_.find(handle);
        return found == objects_.end() ? nullptr : found->second;
    }
    std::shared_ptr<T> get(Handle handle, CUresult otherwise = CUDA_ERROR_INVALID_HANDLE) const {
        auto object = find(handle);
        require(object != nullptr, otherwise);
        return object;
    }
    std::shared_ptr<T> remove(Handle handle, CUresult otherwise = CUDA_ERROR_INVALID_HANDLE) {
        std::lock_guard lock(mutex_);
        const auto found = objects_.find(handle);
        require(found != objects_.end(), otherwise);
        auto object = std::move(found->second);
        objects_.erase(found);
        return object;
    }
    // As remove, but it may be gone already.
    void forget(Handle handle) {
        std::shared_ptr<T> gone;  // ends after the lock
        std::lock_guard lock(mutex_);
        const auto found = objects_.find(handle);
        if (found == objects_.end()) return;
        gone = std::move(found->second);
        objects_.erase(found);
    }
    template <typename Visit>
    void for_each(Visit visit) const {
        std::shared_lock lock(mutex_);
        for (const auto& [handle, object] : objects_) visit(*object);
    }
    template <typename Predicate>
    void remove_if(Predicate predicate) {
        std::vector<std::shared_ptr<T>> gone;  // ends after the lock
        std::lock_guard lock(mutex_);
        for (auto it = objects_.begin(); it != objects_.end();) {
            if (!predicate(*it->second)) {
                ++it;
                continue;
            }
            gone.push_back(std::move(it->second));
            it = objects_.erase(it);
        }
    }

  private:
    mutable std::shared_mutex mutex_;
    std::unordered_map<Handle, std::shared_ptr<T>> objects_;
};

}  // namespace phos::softgpu
