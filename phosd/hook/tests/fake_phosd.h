// A phosd that hears what programs wish, and answers them as a test likes.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/channel.h"
#include "base/descriptors.h"
#include "check.h"

namespace phos::test {

inline std::string runtime_dir() {
    return std::getenv("PHOS_RUNTIME_DIR");
}

// Hears wishes, each on a connection of its own, and answers with a status.
class Daemon {
  public:
    explicit Daemon(wire::Status status = wire::Status::ok, bool answers = true)
        : path_(runtime_dir() + "/program.sock"), status_(status), answers_(answers) {
        listener_ = channel::listen_at(path_);
        CHECK(listener_ >= 0);
        thread_ = std::thread([this] { serve(); });
    }
    ~Daemon() {
        over_ = true;
        thread_.join();
        descriptors::release(listener_);
        unlink(path_.c_str());
        for (const int connection : kept_) descriptors::release(connection);
    }
    std::string name(size_t count) {
        next(count);
        const std::lock_guard lock(mutex_);
        return names_[count - 1];
    }
    wire::ProgramWish next(size_t count) {
        for (int i = 0;; ++i) {
            CHECK(i < 20000);
            {
                const std::lock_guard lock(mutex_);
                if (heard_.size() >= count) return heard_[count - 1];
            }
            usleep(1000);
        }
    }
    // Whether the program has closed a connection that was not answered.
    bool has_lost(size_t number) {
        char byte;
        const std::lock_guard lock(mutex_);
        return recv(kept_.at(number), &byte, 1, MSG_DONTWAIT) == 0;
    }
    size_t heard() {
        const std::lock_guard lock(mutex_);
        return heard_.size();
    }

  private:
    void serve() {
        while (!over_) {
            const int connection = channel::accept_from(listener_, nullptr);
            if (connection < 0) {
                usleep(500);
                continue;
            }
            channel::Message message;
            if (channel::receive(connection, &message)) {
                wire::ProgramWish wish{};
                CHECK(message.payload.size() >= sizeof wish);
                std::memcpy(&wish, message.payload.data(), sizeof wish);
                const std::string name(message.payload.begin() + sizeof wish,
                                       message.payload.end());
                CHECK(name.size() == wish.name_size);
                const std::lock_guard lock(mutex_);
                heard_.push_back(wish);
                names_.push_back(name);
            }
            if (!answers_) {
                const std::lock_guard lock(mutex_);
                kept_.push_back(connection);
                continue;
            }
            const std::string why = status_ == wire::Status::ok ? "" : "Busy: too often";
            const wire::Header header{wire::kMagic,
                                      wire::kVersion,
                                      static_cast<uint16_t>(wire::Type::program) | wire::kReply,
                                      message.header.sequence,
                                      static_cast<uint32_t>(status_),
                                      static_cast<uint32_t>(why.size()),
                                      0};
            CHECK(channel::send(connection, header, why.data(), {}));
            descriptors::release(connection);
        }
    }

    std::string path_;
    wire::Status status_;
    bool answers_;
    int listener_ = -1;
    std::atomic<bool> over_{false};
    std::mutex mutex_;
    std::vector<wire::ProgramWish> heard_;
    std::vector<std::string> names_;
    std::vector<int> kept_;
    std::thread thread_;
};

}  // namespace phos::test
