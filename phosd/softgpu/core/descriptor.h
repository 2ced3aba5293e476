// An owned file descriptor, and how descriptors are kept out of the program's way.
#pragma once

#include <utility>

namespace phos::softgpu {

class Descriptor {
  public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Descriptor() { reset(); }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void reset();

    // The same file under a number above the program's soft limit, so that a thousand allocations
    // do not take away the numbers it opens files with. Where the hard limit leaves no room, the
    // number is an ordinary one.
    Descriptor out_of_the_way() const;

  private:
    int fd_ = -1;
};

}  // namespace phos::softgpu
