#include "core/device_file.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "core/error.h"

namespace phos::softgpu {
namespace {

constexpr size_t kMapped = 4096;  // bytes, which nobody touches

}  // namespace

void DeviceFile::take(const std::string& path) {
    path_ = path;
    resume();
    taken_ = true;
}

void DeviceFile::give_up() {
    suspend();
    taken_ = false;
}

void DeviceFile::resume() {
    if (path_.empty()) return;
    file_ = Descriptor(open(path_.c_str(), O_RDWR | O_CLOEXEC));
    require(bool(file_), CUDA_ERROR_OPERATING_SYSTEM);
    if (!mapped_) return;
    mapping_ = mmap(nullptr, kMapped, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    if (mapping_ == MAP_FAILED) {
        mapping_ = nullptr;
        fail(CUDA_ERROR_OPERATING_SYSTEM);
    }
}

void DeviceFile::suspend() {
    if (mapping_) munmap(mapping_, kMapped);
    mapping_ = nullptr;
    file_.reset();
}

}  // namespace phos::softgpu
