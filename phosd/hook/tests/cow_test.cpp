// Copy-on-write with the software GPU: whatever the program does, what a mover saves is what memory
// held when the board was armed.
#include <chrono>
#include <mutex>
#include <random>

#include "fake_mover.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

constexpr size_t kMegabyte = 1 << 20;
constexpr unsigned kBuffers = 8;
constexpr unsigned kWriters = 4;

// Memory that all threads of the program write to, of either device, each by an address of its own:
// the same chunk is reached by several mappings, and the thread sanitizer sees no race in that.
struct Buffer {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at[kWriters];
    size_t size;
};
std::vector<Buffer> shared;
CUdeviceptr small[kWriters];  // of cuMemAlloc, in one slab
constexpr size_t kSmall = 6000;

// What threads of the program do to memory that others write as well.
void write_somewhere(std::mt19937& random, unsigned writer, CUstream stream) {
    const Buffer& buffer = shared[random() % shared.size()];
    const bool large = random() % 4 != 0;
    const CUdeviceptr base = large ? buffer.at[writer] : small[writer];
    const size_t start = random() % (large ? buffer.size / 4 : 1000) * 4;
    const size_t most = (large ? buffer.size : kSmall) - start;
    const size_t size = std::min<size_t>(most, random() % 65536 * 4 + 4);
    const CUdeviceptr to = base + start;
    const unsigned kind = random() % 6;
    const bool of_default_stream = kind == 2 || kind == 3;
    if (of_default_stream) OK(cuStreamSynchronize(stream));
    switch (kind) {
        case 0:
            OK(cuMemsetD32Async(to, random(), size / 4, stream));
            break;
        case 1:
            OK(cuMemcpyDtoDAsync_v2(to, shared[0].at[writer], std::min(size, shared[0].size),
                                    stream));
            break;
        case 2:
            OK(cuMemsetD32_v2(to, random(), size / 4));
            break;
        case 3: {
            const std::vector<unsigned> host(1024, static_cast<unsigned>(random()));
            OK(cuMemcpyHtoD_v2(to, host.data(), std::min(most, host.size() * 4)));
            break;
        }
        default:
            launch(set_value, stream, to, static_cast<unsigned>(random()));
    }
    if (of_default_stream) OK(cuStreamSynchronize(nullptr));
}

// The program's threads: writers of shared memory, and one that allocates, writes and frees its own
// and checks what it reads back.
class Program {
  public:
    Program() {
        for (unsigned i = 0; i < kWriters; ++i) {
            CUstream stream = nullptr;
            if (i) OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
            workers_.push_back(
                std::make_unique<Worker>([i, stream, random = std::mt19937(i)](unsigned) mutable {
                    write_somewhere(random, i, stream);
                    if (random() % 8 == 0) OK(cuStreamSynchronize(stream));
                }));
        }
        workers_.push_back(std::make_unique<Worker>([](unsigned step) {
            CUdeviceptr at = 0;
            unsigned value = 0;
            OK(cuMemAlloc_v2(&at, step % 3 ? 5 * kMegabyte : 5000));
            OK(cuMemsetD32_v2(at, step, 1000));
            OK(cuMemcpyDtoH_v2(&value, at + 3996, 4));
            CHECK(value == step);
            OK(cuMemFree_v2(at));
        }));
    }
    void more(uint64_t steps) {
        for (const auto& worker : workers_) worker->more(steps);
    }

  private:
    std::vector<std::unique_ptr<Worker>> workers_;
};

void make_buffers() {
    const CUmemAccessDesc access[] = {
        {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
        {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    CUcontext other = nullptr;
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    for (unsigned i = 0; i < kBuffers; ++i) {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, i % 4 == 3};
        Buffer buffer{};
        buffer.size = (1 + i / 2) * board::kChunk;
        OK(cuMemCreate(&buffer.handle, buffer.size, &properties, 0));
        for (CUdeviceptr& at : buffer.at) {
            OK(cuMemAddressReserve(&at, buffer.size, 0, 0, 0));
            OK(cuMemMap(at, buffer.size, 0, buffer.handle, 0));
            OK(cuMemSetAccess(at, buffer.size, access, 2));
        }
        OK(cuMemsetD8_v2(buffer.at[0], static_cast<unsigned char>(i + 1), buffer.size));
        shared.push_back(buffer);
    }
    for (CUdeviceptr& at : small) OK(cuMemAlloc_v2(&at, kSmall));
    OK(cuCtxSynchronize());
}

void free_buffers() {
    for (const Buffer& buffer : shared) {
        for (const CUdeviceptr at : buffer.at) OK(cuMemUnmap(at, buffer.size));
        OK(cuMemRelease(buffer.handle));
    }
    for (const CUdeviceptr at : small) OK(cuMemFree_v2(at));
    shared.clear();
}

// Everything is saved right, with whatever number of slots, while several threads write.
void all_is_saved_right(Client& client) {
    make_buffers();
    unsigned shadowed = 0;
    uint64_t waits = 0;
    {
        Program program;
        for (const unsigned slots : {64u, 0u, 1u, 3u, 12u, 64u}) {
            program.more(3);
            close_gate(client);
            FakeMover mover(client, {slots, slots / 2});
            const uint64_t pending = count_of(mover.arm(client));
            CHECK(pending == mover.board().chunk_count());
            mover.start({200, slots % 2 ? 300u : 0u});
            client.open_gate();
            program.more(10);
            CHECK(mover.wait_saved());
            mover.stop();
            const uint64_t of_slots = count_of(client.ask(wire::Type::disarm));
            CHECK(of_slots == mover.saved_from_slots());
            CHECK(of_slots <= pending && (slots || !of_slots));
            CHECK(mover.wrong() == 0);
            const auto& header = mover.board().header();
            CHECK(header.submissions > 0 && header.touches > 0);
            for (uint32_t i = 0; i < mover.slab_count(); ++i)
                CHECK(mover.board().slab(i).released == 1);
            shadowed += static_cast<unsigned>(of_slots);
            waits += header.waits;
        }
    }
    std::printf("all is saved right: %u chunks from slots, %lu waits\n", shadowed,
                static_cast<unsigned long>(waits));
    CHECK(shadowed > 10 && waits > 0);
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    free_buffers();
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    start_workload();
    Client client(getpid());
    all_is_saved_right(client);
    std::puts("ok");
}
