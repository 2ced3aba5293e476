#include "memory/blocks.h"

#include <fcntl.h>

#include "base/descriptors.h"
#include "memory/contexts.h"
#include "memory/events.h"

namespace phos::blocks {

std::mutex mutex;
std::map<uint64_t, Block> by_id;
std::map<uint64_t, Mapping> by_address;
uint64_t last_id = 0;
uint64_t freed = 0;
bool mapped = true;

namespace {
constexpr CUmemGenericAllocationHandle kVirtual = 0x5048'4f53'0000'0000;  // unlike any address

std::map<uint64_t, Block*> renewed;  // by number, those with a new id
}  // namespace

Block* adopt(CUmemGenericAllocationHandle handle, const CUmemAllocationProp& properties,
             uint64_t size, uint32_t flags) {
    Block block{};
    block.id = block.number = ++last_id;
    block.size = size;
    block.properties = properties;
    block.handle = handle;
    block.flags = flags;
    if (block.device() < 0) block.flags |= wire::kHostLocated;
    return &by_id.emplace(block.id, block).first->second;
}

CUresult create(const CUmemAllocationProp& asked, uint64_t size, uint32_t flags, Block** made) {
    CUmemAllocationProp properties = asked;
    properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(
        asked.requestedHandleTypes | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = driver.cuMemCreate(&handle, size, &properties, 0);
    const bool foreign = result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY &&
                         properties.requestedHandleTypes != asked.requestedHandleTypes;
    if (foreign) {
        properties = asked;
        result = driver.cuMemCreate(&handle, size, &properties, 0);
    }
    if (result != CUDA_SUCCESS) return result;
    *made = adopt(handle, properties, size, flags);
    (*made)->asked = asked.requestedHandleTypes;
    (*made)->foreign = foreign;
    return CUDA_SUCCESS;
}

void drop_if_unused(Block* block) {
    if (block->references || !block->mappings.empty()) return;
    driver.cuMemRelease(block->handle);
    if (block->descriptor >= 0) descriptors::release(block->descriptor);
    if (!block->foreign) {
        ++freed;
        events::freed(block->id, block->device(), block->size);
    }
    renewed.erase(block->number);
    by_id.erase(block->id);
}

void renew(Block& block) {
    events::freed(block.id, block.device(), block.size);
    auto node = by_id.extract(block.id);
    node.key() = block.id = ++last_id;
    by_id.insert(std::move(node));
    renewed[block.number] = &block;
    ++freed;
    events::remapped();
}

CUresult map(Block* block, uint64_t address, uint64_t size, uint64_t offset,
             unsigned long long flags) {
    const CUresult result = driver.cuMemMap(address, size, offset, block->handle, flags);
    if (result != CUDA_SUCCESS) return result;
    by_address[address] = Mapping{size, offset, block, {}, 0};
    block->mappings.insert(address);
    if ((block->flags & wire::kImported) && offset + size > block->size)
        block->size = offset + size;
    events::remapped();
    return CUDA_SUCCESS;
}

CUresult map_again(uint64_t address, const Mapping& mapping) {
    CUresult result =
        driver.cuMemMap(address, mapping.size, mapping.offset, mapping.block->handle, 0);
    if (result == CUDA_SUCCESS && !mapping.access.empty()) {
        result = driver.cuMemSetAccess(address, mapping.size, mapping.access.data(),
                                       mapping.access.size());
        if (result != CUDA_SUCCESS) driver.cuMemUnmap(address, mapping.size);
    }
    return result;
}

CUresult unmap(uint64_t address, uint64_t size) {
    events::unmapping(address, size);
    const CUresult result = driver.cuMemUnmap(address, size);
    if (result != CUDA_SUCCESS) return result;
    auto at = by_address.lower_bound(address);
    while (at != by_address.end() && at->first - address < size) {
        Block* block = at->second.block;
        block->mappings.erase(at->first);
        at = by_address.erase(at);
        drop_if_unused(block);
    }
    return CUDA_SUCCESS;
}

CUresult set_access(uint64_t address, uint64_t size, const CUmemAccessDesc* access, size_t count) {
    for (size_t i = 0; i < count; ++i)
        if (!(access[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ)) events::unmapping(address, size);
    const CUresult result = driver.cuMemSetAccess(address, size, access, count);
    if (result != CUDA_SUCCESS) return result;
    for (auto at = by_address.lower_bound(address);
         at != by_address.end() && at->first - address < size; ++at) {
        std::vector<CUmemAccessDesc>& known = at->second.access;
        for (size_t i = 0; i < count; ++i) {
            auto same = known.begin();
            while (same != known.end() && (same->location.type != access[i].location.type ||
                                           same->location.id != access[i].location.id))
                ++same;
            if (same == known.end())
                known.push_back(access[i]);
            else
                *same = access[i];
        }
    }
    events::remapped();
    return CUDA_SUCCESS;
}

std::pair<const uint64_t, Mapping>* find(uint64_t address) {
    auto at = by_address.upper_bound(address);
    if (at == by_address.begin()) return nullptr;
    --at;
    return address - at->first < at->second.size ? &*at : nullptr;
}

bool extent_of(uint64_t address, uint64_t* begin, uint64_t* end) {
    const auto above = by_address.upper_bound(address);
    if (above == by_address.begin()) return false;
    auto first = std::prev(above);
    if (address - first->first >= first->second.size) return false;
    const auto is_programs = [](const Mapping& one) {
        return one.block->flags & wire::kProgramVmm;
    };
    *begin = first->first;
    *end = first->first + first->second.size;
    if (!is_programs(first->second)) return true;
    for (; first != by_address.begin(); *begin = first->first) {
        const auto before = std::prev(first);
        if (!is_programs(before->second) || before->first + before->second.size != *begin) break;
        first = before;
    }
    for (auto next = above; next != by_address.end() && next->first == *end; ++next) {
        if (!is_programs(next->second)) break;
        *end += next->second.size;
    }
    return true;
}

bool needs_reexport(const Block& block) {
    return !block.foreign && block.borrowed && block.descriptor < 0 &&
           !(block.flags & wire::kImported);  // a peer has it, too
}

CUresult create_another(const Block& block, CUmemGenericAllocationHandle* handle) {
    CUmemAllocationProp properties = block.properties;
    properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(
        block.asked | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    return driver.cuMemCreate(handle, block.size, &properties, 0);
}

CUresult export_descriptor(const Block& block, int* descriptor) {
    if (block.descriptor >= 0) {
        *descriptor = fcntl(block.descriptor, F_DUPFD_CLOEXEC, 0);
        return *descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (!block.exportable()) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = driver.cuMemExportToShareableHandle(
        descriptor, block.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result == CUDA_SUCCESS) fcntl(*descriptor, F_SETFD, FD_CLOEXEC);
    return result;
}

void keep_buffer_ids(const Block& block) {
    // Memory that the hook makes for cuMemAlloc has the hook's own ids.
    if (!(block.flags & (wire::kProgramVmm | wire::kImported))) return;
    const Current current(contexts::any_on(block.device() < 0 ? 0 : block.device()));
    if (!current) return;
    for (const uint64_t address : block.mappings) {
        uint64_t& known = by_address.at(address).buffer_id;
        unsigned long long id = 0;
        if (!known && driver.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address) ==
                          CUDA_SUCCESS)
            known = id;
    }
}

CUmemGenericAllocationHandle virtual_handle(const Block& block) {
    return kVirtual | block.number;
}

Block* behind(CUmemGenericAllocationHandle handle) {
    if ((handle & ~0xffff'ffffull) != kVirtual) return nullptr;
    const uint64_t number = handle & 0xffff'ffff;
    const auto found = by_id.find(number);
    const auto other = renewed.find(number);
    Block* block = found != by_id.end()     ? &found->second
                   : other != renewed.end() ? other->second
                                            : nullptr;
    return block && block->references ? block : nullptr;
}

}  // namespace phos::blocks
