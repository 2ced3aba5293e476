#include "core/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

constexpr size_t kPage = 4096;
constexpr char kHostName[] = "host";
constexpr char kPrefix[] = "phos-softgpu-";
// Memory that cannot shrink under whoever maps it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

CUmemAllocationProp imported_properties(int device) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = device < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device < 0 ? 0 : device;
    return properties;
}

// Copies what is not zero, so that the copy takes no more room than it must.
void copy_pages(std::byte* to, const std::byte* from, size_t size) {
    static const std::byte zeros[kPage] = {};
    for (size_t at = 0; at < size; at += kPage)
        if (std::memcmp(from + at, zeros, kPage) != 0) std::memcpy(to + at, from + at, kPage);
}

std::byte* map_anywhere(int descriptor, size_t size, int protection) {
    const int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    void* at = mmap(nullptr, size, protection, flags, descriptor, 0);
    require(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    return static_cast<std::byte*>(at);
}

}  // namespace

Memory::Memory(size_t size_, int device_, bool imported_, bool exportable,
               const CUmemAllocationProp& properties_)
    : id(next_id()),
      size(size_),
      device(device_),
      imported(imported_),
      properties(properties_),
      exportable_(exportable) {}

std::shared_ptr<Memory> Memory::create(size_t size, int device, bool exportable,
                                       const CUmemAllocationProp& properties) {
    std::shared_ptr<Memory> memory(new Memory(size, device, false, exportable, properties));
    memory->make_file();
    return memory;
}

std::shared_ptr<Memory> Memory::import(int descriptor) {
    const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
    char target[PATH_MAX];
    const ssize_t length = readlink(path.c_str(), target, sizeof target);
    const std::string prefix = std::string("/memfd:") + kPrefix;
    require(length > 0);
    std::string name(target, static_cast<size_t>(length));
    require(name.compare(0, prefix.size(), prefix) == 0);
    name = name.substr(prefix.size(), name.find(' ') - prefix.size());

    struct stat status{};
    require(fstat(descriptor, &status) == 0 && status.st_size > 0 &&
            static_cast<size_t>(status.st_size) % kGranularity == 0);
    require((fcntl(descriptor, F_GET_SEALS) & kSeals) == kSeals);
    int device = -1;
    if (name != kHostName) {
        device = runtime().ordinal_of(name);
        require(device >= 0);
        runtime().require_importable(device);
    }
    std::shared_ptr<Memory> memory(new Memory(static_cast<size_t>(status.st_size), device, true,
                                              true, imported_properties(device)));
    const int duplicate = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
    require(duplicate >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    memory->file_ = Descriptor(duplicate).out_of_the_way();
    memory->inode_ = status.st_ino;
    memory->claim();
    return memory;
}

Memory::~Memory() {
    if (saved_) munmap(saved_, size);
    try {
        give_up();
    } catch (const Error&) {
        // The record stays until the process ends; explain() has said why.
    }
}

void Memory::make_file() {
    const std::string name = kPrefix + (device < 0 ? kHostName : runtime().device(device).name());
    Descriptor file(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    require(bool(file), CUDA_ERROR_OUT_OF_MEMORY);
    struct stat status{};
    require(ftruncate(file.get(), static_cast<off_t>(size)) == 0 &&
                fcntl(file.get(), F_ADD_SEALS, kSeals) == 0 && fstat(file.get(), &status) == 0,
            CUDA_ERROR_OUT_OF_MEMORY);
    inode_ = status.st_ino;
    claim();
    file_ = exportable_ ? file.out_of_the_way() : std::move(file);
}

void Memory::claim() {
    if (device < 0) return;
    require(runtime().device(device).registry().claim(inode_, size), CUDA_ERROR_OUT_OF_MEMORY);
    claimed_ = true;
}

void Memory::give_up() {
    file_.reset();
    if (!claimed_) return;
    claimed_ = false;
    runtime().device(device).registry().release(inode_);
}

void Memory::map_at(uint64_t address, size_t bytes, size_t offset, int protection) {
    void* wanted = reinterpret_cast<void*>(address);
    void* at = mmap(wanted, bytes, protection, MAP_SHARED | MAP_FIXED, file_.get(),
                    static_cast<off_t>(offset));
    require(at == wanted, CUDA_ERROR_OUT_OF_MEMORY);
    madvise(at, bytes, MADV_DONTFORK);  // a child has no use for it and would keep it alive
}

void Memory::save(uint64_t mapped_at) {
    std::byte* view = file_ ? map_anywhere(file_.get(), size, PROT_READ)
                            : reinterpret_cast<std::byte*>(mapped_at);
    saved_ = map_anywhere(-1, size, PROT_READ | PROT_WRITE);
    copy_pages(saved_, view, size);
    if (file_) munmap(view, size);
    give_up();
}

void Memory::load() {
    make_file();
    std::byte* view = map_anywhere(file_.get(), size, PROT_READ | PROT_WRITE);
    copy_pages(view, saved_, size);
    munmap(view, size);
    munmap(saved_, size);
    saved_ = nullptr;
}

void Memory::settle() {
    if (!exportable_) file_.reset();
}

}  // namespace phos::softgpu
