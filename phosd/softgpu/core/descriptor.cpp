#include "core/descriptor.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include "core/error.h"

namespace phos::softgpu {

void Descriptor::reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

Descriptor Descriptor::out_of_the_way() const {
    // A number is checked against the limit only when it is given out: raise the limit, take the
    // number, put the limit back.
    static std::mutex& limits = *new std::mutex;
    std::lock_guard lock(limits);
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    if (before.rlim_max > before.rlim_cur) {
        rlimit raised = before;
        raised.rlim_cur = std::min<rlim_t>(before.rlim_max, before.rlim_cur + (1 << 16));
        if (setrlimit(RLIMIT_NOFILE, &raised) == 0) {
            const int fd = fcntl(fd_, F_DUPFD_CLOEXEC, static_cast<int>(before.rlim_cur));
            setrlimit(RLIMIT_NOFILE, &before);
            if (fd >= 0) return Descriptor(fd);
        }
    }
    // No room above: from the upper half, which a program reaches last.
    int fd = fcntl(fd_, F_DUPFD_CLOEXEC, static_cast<int>(before.rlim_cur / 2));
    if (fd < 0) fd = fcntl(fd_, F_DUPFD_CLOEXEC, 3);
    require(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    return Descriptor(fd);
}

}  // namespace phos::softgpu
