// Memory as the program sees it: the answers of cuMemAlloc's memory, slabs, pools, the program's
// own virtual memory, and that nothing is left over.
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "memory/arena.h"

using namespace phos;
using namespace phos::test;

namespace {

void arena_never_overlaps() {
    Arena arena;
    std::mt19937_64 random(1);
    std::map<uint64_t, uint64_t> taken;
    constexpr uint64_t kSlab = 2 << 20;
    uint64_t next = kSlab;
    uint64_t slabs = 0;
    for (int i = 0; i < 20000; ++i) {
        if (random() % 5 < 3 || taken.empty()) {
            const uint64_t size = (random() % 64 + 1) * Arena::kAlignment;
            uint64_t at = arena.take(size);
            if (!at) {
                arena.add_slab(next, kSlab);  // adjacent slabs: ranges must not grow across
                next += kSlab;
                ++slabs;
                at = arena.take(size);
            }
            CHECK(at && at % Arena::kAlignment == 0);
            CHECK(at / kSlab == (at + size - 1) / kSlab);
            const auto after = taken.lower_bound(at);
            CHECK(after == taken.end() || after->first >= at + size);
            CHECK(after == taken.begin() ||
                  std::prev(after)->first + std::prev(after)->second <= at);
            taken[at] = size;
        } else {
            auto victim = taken.begin();
            std::advance(victim, static_cast<long>(random() % taken.size()));
            arena.give(victim->first, victim->second);
            taken.erase(victim);
        }
    }
    for (const auto& [at, size] : taken) arena.give(at, size);
    while (arena.remove_empty(0)) --slabs;
    CHECK(slabs == 0);
}

void answers_are_the_drivers(Client& client) {
    CUdeviceptr a = 0;
    CUdeviceptr b = 0;
    CHECK(cuMemAlloc_v2(&a, 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemAlloc_v2(&a, 1000));
    OK(cuMemAlloc_v2(&b, 5000000));
    CHECK(a % 512 == 0 && b % 512 == 0);
    CUdeviceptr base = 0;
    size_t size = 0;
    OK(cuMemGetAddressRange_v2(&base, &size, a + 999));
    CHECK(base == a && size == 1000);
    CHECK(cuMemGetAddressRange_v2(&base, &size, a + 1000) == CUDA_ERROR_NOT_FOUND);
    OK(cuMemGetAddressRange_v2(&base, &size, b + 4999999));
    CHECK(base == b && size == 5000000);
    unsigned long long handles = 99;
    OK(cuPointerGetAttribute(&handles, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, b));
    CHECK(handles == 0);  // the hook's own exportable bit does not show
    CUmemGenericAllocationHandle handle = 0;
    CHECK(cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(a)) ==
          CUDA_ERROR_INVALID_VALUE);
    CHECK(cuMemFree_v2(b + 512) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFree_v2(0));
    OK(cuMemFree_v2(b));
    CHECK(cuMemFree_v2(b) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFree_v2(a));
    size_t pitch = 0;
    OK(cuMemAllocPitch_v2(&a, &pitch, 513, 2, 8));
    CHECK(pitch == 1024);
    OK(cuMemGetAddressRange_v2(&base, &size, a));
    CHECK(size == 2048);
    CHECK(cuMemAllocPitch_v2(&b, &pitch, 10, 2, 3) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFree_v2(a));
    CHECK(client.list().size() == 1);  // the one slab that is kept
}

void small_allocations_share_slabs(Client& client) {
    std::vector<CUdeviceptr> all(10000);
    for (CUdeviceptr& address : all) OK(cuMemAlloc_v2(&address, 4096));
    uint64_t bytes = 0;
    for (const wire::Block& block : client.list()) bytes += block.size;
    CHECK(bytes >= 10000ull * 4096 && bytes <= 44ull << 20);
    for (const CUdeviceptr address : all) OK(cuMemFree_v2(address));
    CHECK(client.list().size() == 1);
}

CUmemAllocationProp plain_memory() {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    return properties;
}

void virtual_memory_of_the_program(Client& client) {
    constexpr size_t kSize = 4 << 20;
    CUmemAllocationProp properties = plain_memory();
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const size_t before = client.list().size();
    CUmemGenericAllocationHandle handle = 0;
    OK(cuMemCreate(&handle, kSize, &properties, 0));
    CUdeviceptr at = 0;
    OK(cuMemAddressReserve(&at, 2 * kSize, 0, 0, 0));
    OK(cuMemMap(at, kSize, 0, handle, 0));
    OK(cuMemMap(at + kSize, kSize, 0, handle, 0));  // the same memory twice
    OK(cuMemSetAccess(at, 2 * kSize, &access, 1));
    OK(cuMemsetD8_v2(at + 5, 77, 100));
    unsigned char byte = 0;
    OK(cuMemcpyDtoH_v2(&byte, at + kSize + 60, 1));
    CHECK(byte == 77);
    CUmemGenericAllocationHandle again = 0;
    OK(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(at + 100)));
    CHECK(again == handle);
    int descriptor = -1;
    // Natively it was made without a handle type, so it cannot be exported.
    CHECK(cuMemExportToShareableHandle(&descriptor, handle,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                       0) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemGetAllocationPropertiesFromHandle(&properties, handle));
    CHECK(properties.requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE);
    OK(cuMemRelease(handle));
    OK(cuMemRelease(handle));
    CHECK(client.list().size() == before + 1);  // it lives while it is mapped
    OK(cuMemUnmap(at, 2 * kSize));
    CHECK(client.list().size() == before);
    CHECK(cuMemMap(at, kSize, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemAddressFree(at, 2 * kSize));

    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    OK(cuMemCreate(&handle, kSize, &properties, 0));
    OK(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    0));
    CUmemGenericAllocationHandle imported = 0;
    OK(cuMemImportFromShareableHandle(&imported,
                                      reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    CHECK(imported != handle);
    CHECK(cuMemExportToShareableHandle(&descriptor, imported,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                       0) == CUDA_ERROR_INVALID_VALUE);
    const auto blocks = client.list();
    CHECK(blocks.size() == before + 2);
    CHECK(blocks[blocks.size() - 2].flags & wire::kExported);
    CHECK(blocks.back().flags & wire::kImported);
    OK(cuMemRelease(imported));
    OK(cuMemRelease(handle));
    CHECK(client.list().size() == before);
}

void stream_ordered_memory(Client& client) {
    CUstream one = nullptr;
    CUstream two = nullptr;
    OK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
    CUdeviceptr a = 0;
    OK(cuMemAllocAsync(&a, 3 << 20, one));
    OK(cuMemsetD32Async(a, 5, 1000, one));
    OK(cuMemFreeAsync(a, one));
    CUdeviceptr b = 0;
    OK(cuMemAllocAsync(&b, 3 << 20, one));
    CHECK(a == b);  // the same stream may have it at once
    unsigned value = 0;
    OK(cuMemsetD32Async(b, 9, 1000, one));
    OK(cuMemcpyDtoHAsync_v2(&value, b + 400, 4, one));
    OK(cuStreamSynchronize(one));
    CHECK(value == 9);
    CUmemoryPool pool = nullptr;
    cuuint64_t used = 0;
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    CHECK(used == 4 << 20);
    OK(cuMemFreeAsync(b, one));
    OK(cuStreamSynchronize(one));
    OK(cuMemPoolTrimTo(pool, 0));
    CHECK(client.list().size() == 1);
    OK(cuMemAllocAsync(&a, 1000, two));
    OK(cuMemFree_v2(a));
    OK(cuMemPoolTrimTo(pool, 0));
    CHECK(client.list().size() == 1);
    OK(cuStreamDestroy_v2(one));
    OK(cuStreamDestroy_v2(two));
}

size_t free_memory() {
    size_t free = 0;
    size_t total = 0;
    OK(cuMemGetInfo_v2(&free, &total));
    return free;
}

// Also when the program never allocates again: after it has waited, and before it is saved.
void what_a_stream_freed_is_free(Client& client) {
    constexpr size_t kSize = 96 << 20;
    CUstream stream = nullptr;
    CUevent event = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const auto waits = [&](int way) {
        if (way == 0) OK(cuStreamSynchronize(stream));
        if (way == 1) OK(cuCtxSynchronize());
        if (way == 2) OK(cuEventSynchronize(event));
    };
    for (int way = 0; way < 3; ++way) {
        const size_t before = free_memory();
        CUdeviceptr memory = 0;
        OK(cuMemAllocAsync(&memory, kSize, stream));
        OK(cuMemFreeAsync(memory, stream));
        OK(cuEventRecord(event, stream));
        CHECK(free_memory() + kSize <= before);
        waits(way);
        CHECK(free_memory() == before);
    }
    // A pool that is to keep it does so, until a checkpoint comes.
    CUmemoryPool pool = nullptr;
    cuuint64_t threshold = UINT64_MAX;
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    const size_t before = free_memory();
    for (const bool closes : {true, false}) {
        CUdeviceptr memory = 0;
        OK(cuMemAllocAsync(&memory, kSize, stream));
        OK(cuMemFreeAsync(memory, stream));
        OK(cuStreamSynchronize(stream));
        CHECK(client.list().back().size == kSize);
        CHECK(free_memory() + kSize <= before);
        if (closes) {
            CHECK(client.close_gate(5000));
            client.open_gate();
        } else {
            for (const auto& [id, descriptor] : client.export_all()) close(descriptor);
        }
        CHECK(client.list().back().size != kSize);
        CHECK(free_memory() == before);
    }
    threshold = 0;
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
}

// One byte of each block is written and compared: filling all of them would take seconds.
void parked_memory_comes_back(Client& client) {
    std::vector<CUdeviceptr> all(300);
    const auto compared = [&](size_t i) { return all[i] + (i * 7919) % (2 << 20); };
    for (size_t i = 0; i < all.size(); ++i) {
        OK(cuMemAlloc_v2(&all[i], (2 << 20) + i));
        OK(cuMemsetD8_v2(compared(i), static_cast<unsigned char>(i), 1));
    }
    const auto blocks = client.list();
    CHECK(client.ask(wire::Type::park).status == wire::Status::wrong_state);
    CHECK(client.close_gate(5000));
    CHECK(client.ask(wire::Type::park).status == wire::Status::wrong_state);  // not exported yet
    const auto log = client.ask(wire::Type::stats).payload;
    CHECK(std::string(log.begin(), log.end()).find("not parked: block ") != std::string::npos);
    auto held = client.export_all();
    CHECK(held.size() == blocks.size());
    CHECK(client.hello().never_stopped == 1);
    CHECK(client.park() == blocks.size());
    CHECK(client.ask(wire::Type::unpark).status == wire::Status::wrong_state);
    CHECK(client.ask(wire::Type::open_gate).status == wire::Status::wrong_state);
    CHECK(client.unpark(held) == blocks.size());
    CHECK(client.hello().ever_parked == 1);
    client.open_gate();
    for (int round = 0; round < 3; ++round) {
        CHECK(client.close_gate(5000));
        if (round == 1) {
            uint64_t count = 0;
            const auto answer = client.ask(wire::Type::rehome);
            std::memcpy(&count, answer.payload.data(), sizeof count);
            CHECK(answer.status == wire::Status::ok && count == blocks.size());
            CHECK(client.hello().ever_parked == 0);
            CHECK(client.hello().never_stopped == 0);  // what the driver restored stays so
            held = client.export_all();
            CHECK(held.size() == blocks.size());
        }
        CHECK(client.park() == blocks.size());
        CHECK(client.unpark(held) == blocks.size());
        client.open_gate();
    }
    const auto after = client.list();
    CHECK(after.size() == blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i)
        CHECK(after[i].id == blocks[i].id && after[i].va == blocks[i].va &&
              after[i].size == blocks[i].size);
    for (size_t i = 0; i < all.size(); ++i) {
        unsigned char byte = 0;
        OK(cuMemcpyDtoH_v2(&byte, compared(i), 1));
        CHECK(byte == static_cast<unsigned char>(i));
        OK(cuMemFree_v2(all[i]));
    }
    CHECK(client.list().size() == 1);
}

unsigned long long buffer_id(CUdeviceptr address) {
    unsigned long long single = 0;
    unsigned long long listed = 0;
    CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_BUFFER_ID;
    void* data = &listed;
    OK(cuPointerGetAttribute(&single, attribute, address));
    OK(cuPointerGetAttributes(1, &attribute, &data, address));
    CHECK(single == listed);
    return single;
}

void parked_memory_keeps_its_ids(Client& client) {
    constexpr size_t kSize = 2 << 20;
    CUmemAllocationProp properties = plain_memory();
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at = 0;
    OK(cuMemAddressReserve(&at, 4 * kSize, 0, 0, 0));
    const auto map_again = [&](CUdeviceptr address, CUmemGenericAllocationHandle handle) {
        OK(cuMemMap(address, kSize, 0, handle, 0));
        OK(cuMemRelease(handle));
        OK(cuMemSetAccess(address, kSize, &access, 1));
    };
    const auto map = [&](CUdeviceptr address) {
        CUmemGenericAllocationHandle handle = 0;
        OK(cuMemCreate(&handle, kSize, &properties, 0));
        map_again(address, handle);
    };
    // Twice: what has come back is parked as well.
    const auto park = [&] {
        CHECK(client.close_gate(5000));
        CHECK(client.ask(wire::Type::rehome).status == wire::Status::ok);
        const auto held = client.export_all();
        for (int time = 0; time < 2; ++time) {
            CHECK(client.park() == held.size());
            CHECK(client.unpark(held) == held.size());
        }
        client.open_gate();
        for (const auto& [id, descriptor] : held) close(descriptor);
    };
    map(at);
    map(at + kSize);
    const unsigned long long first = buffer_id(at);
    const unsigned long long second = buffer_id(at + kSize + 5);
    CHECK(first != second);
    park();
    CHECK(buffer_id(at + 100) == first && buffer_id(at + kSize) == second);
    CUmemGenericAllocationHandle handle = 0;
    OK(cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)));
    map_again(at + 3 * kSize, handle);
    const unsigned long long again = buffer_id(at + 3 * kSize);
    CHECK(again != first && again != second);
    park();
    CHECK(buffer_id(at) == first && buffer_id(at + 3 * kSize) == again);
    map(at + 2 * kSize);
    const unsigned long long third = buffer_id(at + 2 * kSize);
    CHECK(third != first && third != second && third != again);
    // Other memory at the same place is known as other memory.
    OK(cuMemUnmap(at, kSize));
    map(at);
    const unsigned long long other = buffer_id(at);
    CHECK(other != first && other != second && other != third && other != again);
    CHECK(buffer_id(at + kSize) == second);
    OK(cuMemUnmap(at, 4 * kSize));
    OK(cuMemAddressFree(at, 4 * kSize));
}

}  // namespace

int main() {
    arena_never_overlaps();
    start_cuda();
    Client client(getpid());
    answers_are_the_drivers(client);
    small_allocations_share_slabs(client);
    virtual_memory_of_the_program(client);
    stream_ordered_memory(client);
    what_a_stream_freed_is_free(client);
    parked_memory_comes_back(client);
    parked_memory_keeps_its_ids(client);
    CHECK(client.hello().parkable == 1);
    std::puts("ok");
}
