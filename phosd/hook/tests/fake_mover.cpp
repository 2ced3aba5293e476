#include "fake_mover.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>

namespace phos::test {

using board::kChunk;
using board::State;

namespace {

constexpr unsigned kSlotsOfSlab = 8;

State state_of(uint32_t word) {
    return static_cast<State>(word & board::kStateMask);
}

CUmemAllocationProp exportable(int device) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return properties;
}

// A copy that the device does for us on a real mover; here device memory is the host's.
std::vector<char> bytes_at(CUdeviceptr address, size_t size) {
    const char* const at = reinterpret_cast<const char*>(address);
    return {at, at + size};
}

}  // namespace

void* driver_function(const char* name) {
    void* const real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    CHECK(real && library);
    void* const found = reinterpret_cast<void* (*)(void*, const char*)>(real)(library, name);
    CHECK(found);
    return found;
}

void close_gate(Client& client) {
    while (!client.close_gate(4000)) {
    }
}

CUdeviceptr filled(size_t chunks, unsigned value) {
    CUdeviceptr at = 0;
    OK(cuMemAlloc_v2(&at, chunks * kChunk));
    OK(cuMemsetD32_v2(at, value, chunks * kChunk / 4));
    OK(cuCtxSynchronize());
    return at;
}

unsigned value_at(CUdeviceptr at) {
    unsigned value = 0;
    OK(cuMemcpyDtoH_v2(&value, at, 4));
    return value;
}

FakeMover::Memory FakeMover::map(CUmemGenericAllocationHandle handle, size_t size, int device) {
    Memory memory;
    memory.handle = handle;
    memory.size = size;
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device},
                                 CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(DIRECT(cuMemAddressReserve)(&memory.address, size, 0, 0, 0));
    OK(DIRECT(cuMemMap)(memory.address, size, 0, handle, 0));
    OK(DIRECT(cuMemSetAccess)(memory.address, size, &access, 1));
    return memory;
}

void FakeMover::unmap(Memory& memory) {
    OK(DIRECT(cuMemUnmap)(memory.address, memory.size));
    OK(DIRECT(cuMemAddressFree)(memory.address, memory.size));
    OK(DIRECT(cuMemRelease)(memory.handle));
    if (memory.descriptor >= 0) close(memory.descriptor);
}

FakeMover::FakeMover(Client& client, const std::vector<unsigned>& slots) {
    std::map<uint64_t, wire::Block> listed;
    for (const wire::Block& block : client.list()) listed[block.id] = block;
    std::vector<board::BlockRow> rows;
    uint32_t chunks = 0;
    for (const auto& [id, given] : client.export_all()) {
        const wire::Block& block = listed.at(id);
        CUmemGenericAllocationHandle handle = 0;
        OK(DIRECT(cuMemImportFromShareableHandle)(
            &handle, reinterpret_cast<void*>(static_cast<intptr_t>(given)),
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(given);
        blocks_[id] = map(handle, block.size, block.device);
        const auto count = static_cast<uint32_t>((block.size + kChunk - 1) / kChunk);
        rows.push_back({id, chunks, count});
        chunks += count;
        for (uint64_t at = 0; at < block.size; at += kChunk)
            parts_.push_back(
                {id, blocks_[id].address + at, std::min<size_t>(kChunk, block.size - at)});
    }
    for (size_t device = 0; device < slots.size(); ++device) {
        for (unsigned left = slots[device]; left;) {
            const unsigned count = std::min(left, kSlotsOfSlab);
            const CUmemAllocationProp properties = exportable(static_cast<int>(device));
            CUmemGenericAllocationHandle handle = 0;
            OK(DIRECT(cuMemCreate)(&handle, count * kChunk, &properties, 0));
            slabs_.push_back(map(handle, count * kChunk, static_cast<int>(device)));
            OK(DIRECT(cuMemExportToShareableHandle)(&slabs_.back().descriptor, handle,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
            left -= count;
        }
    }
    // An array of rows, for they cannot be moved.
    const auto slab_rows = std::make_unique<board::SlabRow[]>(slabs_.size() + 1);
    size_t row = 0;
    for (size_t device = 0; device < slots.size(); ++device)
        for (unsigned left = slots[device]; left; left -= std::min(left, kSlotsOfSlab), ++row) {
            slab_rows[row].device = static_cast<int32_t>(device);
            slab_rows[row].slots = std::min(left, kSlotsOfSlab);
        }
    board_.reset(board::View::create(rows, slab_rows.get(), static_cast<uint32_t>(slabs_.size()),
                                     nullptr, 0, &descriptor));
    CHECK(board_);
    saved_.resize(chunks);
}

FakeMover::~FakeMover() {
    stop();
    for (auto& [id, memory] : blocks_) unmap(memory);
    for (Memory& slab : slabs_)
        if (slab.handle) unmap(slab);
    close(descriptor);
}

Client::Answer FakeMover::arm(Client& client) {
    std::vector<int> descriptors{descriptor};
    for (const Memory& slab : slabs_) descriptors.push_back(slab.descriptor);
    const wire::Arm request{static_cast<uint32_t>(slabs_.size()), 0};
    expected_.clear();
    for (const Part& part : parts_) expected_.push_back(bytes_at(part.address, part.size));
    return client.ask(wire::Type::arm, &request, sizeof request, descriptors);
}

void FakeMover::start(Pace pace) {
    over_ = false;
    thread_ = std::thread([this, pace] { run(pace); });
}

void FakeMover::stop() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
}

bool FakeMover::wait_saved() {
    for (int i = 0; i < 20000; ++i, usleep(1000)) {
        uint32_t saved = 0;
        while (saved < saved_.size() && state_of(board_->word(saved)) == board::saved) ++saved;
        if (saved == saved_.size()) return true;
    }
    return false;
}

unsigned FakeMover::wrong() {
    unsigned count = 0;
    for (size_t i = 0; i < saved_.size(); ++i) count += saved_[i] != expected_[i];
    return count;
}

void FakeMover::run(Pace pace) {
    while (!over_ && board_->header().phase != board::aborted) {
        answer_pressure(pace);
        const uint32_t posted = board_->header().posted;
        if (!step(pace)) board_->wait_posted(posted, 0.0005);
    }
}

// Saves one chunk, urgent ones first; false when there was nothing to save.
bool FakeMover::step(const Pace& pace) {
    const auto count = static_cast<uint32_t>(parts_.size());
    for (uint32_t i = 0; i < count; ++i)
        if ((board_->word(i) & board::kUrgent) && save(i, pace)) return true;
    for (uint32_t i = 0; i < count && !pace.only_urgent; ++i) {
        if (pace.before_us && i == 0) usleep(pace.before_us);
        const uint32_t chunk = (next_ + i) % count;
        if (!save(chunk, pace)) continue;
        next_ = chunk + 1;
        return true;
    }
    return false;
}

bool FakeMover::save(uint32_t chunk, const Pace& pace) {
    std::atomic<uint32_t>& word = board_->word(chunk);
    const Part& part = parts_[chunk];
    uint32_t seen = word.load(std::memory_order_acquire);
    if (state_of(seen) == board::pending) {
        if (!word.compare_exchange_strong(seen, (seen & ~board::kStateMask) | board::copying,
                                          std::memory_order_acq_rel))
            return false;
        if (pace.copying_us) usleep(pace.copying_us);
        saved_[chunk] = bytes_at(part.address, part.size);
    } else if (state_of(seen) == board::shadowed && pace.takes_shadowed) {
        uint32_t slot = seen >> board::kSlotShift;
        size_t slab = 0;
        for (; slot >= slabs_[slab].size / kChunk; ++slab)
            slot -= static_cast<uint32_t>(slabs_[slab].size / kChunk);
        if (pace.copying_us) usleep(pace.copying_us);
        saved_[chunk] = bytes_at(slabs_[slab].address + slot * kChunk, part.size);
        ++from_slots_;
    } else {
        return false;
    }
    word.store(board::saved, std::memory_order_release);
    board_->progressed();
    return true;
}

void FakeMover::answer_pressure(const Pace& pace) {
    for (board::Pressure& pressure : board_->header().pressure) {
        const uint32_t wanted = pressure.wanted;
        if (wanted <= pressure.given) continue;
        if (!pace.answers_without_doing) let_go_of_freed();
        pressure.given = wanted;
        board_->progressed();
    }
}

// Lets go of freed blocks whose chunks are saved, saving them first, and of slabs that the hook has
// let go of.
void FakeMover::let_go_of_freed() {
    std::vector<uint64_t> ids;
    CHECK(board_->freed(ids));
    for (const uint64_t id : ids) {
        for (uint32_t i = 0; i < parts_.size(); ++i)
            while (parts_[i].block == id && state_of(board_->word(i)) != board::saved)
                if (!save(i, {})) usleep(100);
        const auto found = blocks_.find(id);
        CHECK(found != blocks_.end());
        unmap(found->second);
        blocks_.erase(found);
    }
    for (uint32_t i = 0; i < slabs_.size(); ++i)
        if (slabs_[i].handle && board_->slab(i).released) {
            unmap(slabs_[i]);
            slabs_[i].handle = 0;
        }
    board_->freed_taken();
}

}  // namespace phos::test
