// Share stream-ordered pools between hooked processes. The driver keeps its devices open through
// its checkpoint for a pool that can be exported, and cannot restore a process that imported one.
// So its own pools are never exportable under the hook: an importer gets a pool that is empty, and
// maps single allocations by tickets, as those of legacy IPC.
#include "intercept/pool_sharing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "base/overrides.h"
#include "base/process.h"
#include "gate/gate.h"
#include "intercept/legacy_ipc.h"
#include "memory/backed_pools.h"
#include "memory/contexts.h"
#include "park/reexport.h"

namespace phos {
namespace {

using backed_pools::Pool;
using legacy_ipc::kPoolMagic;
using legacy_ipc::Ticket;

// What the descriptor of an exported pool leads to: a file in memory with this, for good.
struct Card {
    uint64_t magic;
    CUuuid gpu;
};
static_assert(sizeof(Ticket) <= sizeof(CUmemPoolPtrExportData));

struct Import {
    CUmemoryPool pool;
    unsigned opened;
};

// Guarded by blocks::mutex.
std::map<uint64_t, Import> imports;  // by address

heap::Heap opened_heap{};  // stands for all of them in stream_frees

int write_card(const Card& card) {
    const int file = memfd_create("phos-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return -1;
    const int seals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (pwrite(file, &card, sizeof card, 0) == sizeof card && fcntl(file, F_ADD_SEALS, seals) == 0)
        return file;
    close(file);
    return -1;
}

bool read_card(int file, Card* card) {
    struct stat status{};
    return fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
           pread(file, card, sizeof *card, 0) == sizeof *card && card->magic == kPoolMagic;
}

// The ordinal of the GPU; the current one if the pool's owner was on another when it exported it,
// before both were moved.
int device_of(const CUuuid& gpu) {
    int count = 0;
    driver.cuDeviceGetCount(&count);
    for (int device = 0; device < count; ++device) {
        CUuuid uuid{};
        if (driver.cuDeviceGetUuid_v2(&uuid, device) == CUDA_SUCCESS &&
            std::memcmp(&uuid, &gpu, sizeof uuid) == 0)
            return device;
    }
    CUcontext context = nullptr;
    int device = 0;
    return contexts::current(&context, &device) ? device : 0;
}

CUresult import_card(CUmemoryPool* pool, const Card& card) {
    Pool state;
    state.device = device_of(card.gpu);
    state.imported = true;
    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, state.device};
    const CUresult result = driver.cuMemPoolCreate(pool, &properties);
    if (result == CUDA_SUCCESS) backed_pools::add(*pool, state);
    return result;
}

// Callback for reexport::sharing.
CUresult share(CUmemPoolPtrExportData* data, CUdeviceptr address, uint64_t* to_reexport) {
    const gate::Pass pass;
    std::unique_lock lock(blocks::mutex);
    const auto* found = heap::find(address);
    if (!found || !found->second.heap->pool) {
        lock.unlock();
        return driver.cuMemPoolExportPointer(data, address);
    }
    const Pool* pool = backed_pools::find(found->second.heap->pool);
    if (!pool || !pool->exportable || found->first != address || found->second.freeing)
        return CUDA_ERROR_INVALID_VALUE;
    Ticket ticket{};
    const CUresult result = legacy_ipc::issue(kPoolMagic, *found, &ticket, to_reexport);
    if (result != CUDA_SUCCESS) return result;
    std::memset(data, 0, sizeof *data);
    std::memcpy(data, &ticket, sizeof ticket);
    return CUDA_SUCCESS;
}

CUresult give_access(uint64_t address, const CUmemAccessDesc* access, size_t count) {
    const auto* mapping = blocks::find(address);
    return mapping && count
               ? blocks::set_access(mapping->first, mapping->second.size, access, count)
               : CUDA_SUCCESS;
}

// False if it is not imported any more.
bool forget(uint64_t address) {
    const auto import = imports.find(address);
    if (import == imports.end()) return false;
    if (--import->second.opened == 0) imports.erase(import);
    return true;
}

void close_opened(uint64_t address) {
    legacy_ipc::close(address);
}

}  // namespace

CUresult overrides::cuMemPoolExportToShareableHandle(void* shareable, CUmemoryPool pool,
                                                     CUmemAllocationHandleType type,
                                                     unsigned long long flags) {
    const gate::Pass pass;
    const KeepErrno keep;
    Card card{kPoolMagic, {}};
    {
        const std::lock_guard lock(blocks::mutex);
        const Pool* const backed = backed_pools::find(pool);
        if (!backed) return driver.cuMemPoolExportToShareableHandle(shareable, pool, type, flags);
        if (!shareable || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
            !backed->exportable)
            return CUDA_ERROR_INVALID_VALUE;
        const CUresult result = driver.cuDeviceGetUuid_v2(&card.gpu, backed->device);
        if (result != CUDA_SUCCESS) return result;
    }
    const int file = write_card(card);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int*>(shareable) = file;
    return CUDA_SUCCESS;
}

CUresult overrides::cuMemPoolImportFromShareableHandle(CUmemoryPool* pool, void* shareable,
                                                       CUmemAllocationHandleType type,
                                                       unsigned long long flags) {
    const gate::Pass pass;
    const KeepErrno keep;
    Card card{};
    const int file = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    if (pool && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
        read_card(file, &card))
        return import_card(pool, card);
    const CUresult result = driver.cuMemPoolImportFromShareableHandle(pool, shareable, type, flags);
    if (result == CUDA_SUCCESS)
        mark_unsupported(Reason::shared_pool,
                         "the program has imported a memory pool that the hook does not back, as "
                         "of a process without the hook");
    return result;
}

CUresult overrides::cuMemPoolExportPointer(CUmemPoolPtrExportData* data, CUdeviceptr address) {
    if (!data) return CUDA_ERROR_INVALID_VALUE;
    return reexport::sharing([=](uint64_t* id) { return share(data, address, id); });
}

CUresult overrides::cuMemPoolImportPointer(CUdeviceptr* address, CUmemoryPool pool,
                                           CUmemPoolPtrExportData* data) {
    if (!address || !data) return CUDA_ERROR_INVALID_VALUE;
    Ticket ticket{};
    std::memcpy(&ticket, data, sizeof ticket);
    if (ticket.magic != kPoolMagic) {
        const gate::Pass pass;
        return driver.cuMemPoolImportPointer(address, pool, data);
    }
    int gpu = 0;
    {
        const std::lock_guard lock(blocks::mutex);
        const Pool* const backed = backed_pools::find(pool);
        if (!backed || !backed->imported) return CUDA_ERROR_INVALID_VALUE;
        gpu = backed->device;
    }
    const CUresult result = legacy_ipc::open(ticket, address, gpu);  // there may be no context yet
    if (result != CUDA_SUCCESS) return result;
    const gate::Pass pass;
    const std::lock_guard lock(blocks::mutex);
    Import& import = imports.try_emplace(*address, Import{pool, 0}).first->second;
    ++import.opened;
    const Pool* const backed = backed_pools::find(pool);
    if (!backed) return CUDA_SUCCESS;  // it was destroyed meanwhile
    const CUmemAccessDesc own{{CU_MEM_LOCATION_TYPE_DEVICE, backed->device},
                              CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    give_access(*address, &own, 1);
    return give_access(*address, backed->access.data(), backed->access.size());
}

namespace pool_sharing {

CUresult change_access(CUmemoryPool pool, const CUmemAccessDesc* access, size_t count) {
    std::vector<CUmemAccessDesc>& all = backed_pools::find(pool)->access;
    all.insert(all.end(), access, access + count);
    for (const auto& [address, import] : imports) {
        if (import.pool != pool) continue;
        const CUresult result = give_access(address, access, count);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

bool is_import(uint64_t address) {
    const std::lock_guard lock(blocks::mutex);
    return imports.count(address) != 0;
}

std::optional<CUresult> free(uint64_t address) {
    if (!is_import(address)) return std::nullopt;
    const CUresult result = contexts::synchronize();
    if (result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(blocks::mutex);
    return forget(address) ? legacy_ipc::close(address) : CUDA_ERROR_INVALID_VALUE;
}

void free_after(uint64_t address, const stream_frees::StreamKey& stream, CUevent event) {
    const std::lock_guard lock(blocks::mutex);
    uint64_t start = address;
    uint64_t size = 0;
    if (forget(address) && legacy_ipc::range_of(address, &start, &size))
        stream_frees::keep_opened(address, size, &opened_heap, &close_opened, stream, event);
    else
        driver.cuEventDestroy_v2(event);  // another thread was first
}

}  // namespace pool_sharing
}  // namespace phos
