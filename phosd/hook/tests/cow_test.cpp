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

void close_gate(Client& client) {
    while (!client.close_gate(kDeadline)) {
    }
}

// Memory that all threads of the program write to, of either device; some in parts of a slab.
struct Buffer {
    CUdeviceptr at;
    size_t size;
};
std::vector<Buffer> shared;

// What threads of the program do to memory that others write as well.
void write_somewhere(std::mt19937& random, CUstream stream) {
    const Buffer& to = shared[random() % shared.size()];
    const Buffer& from = shared[random() % shared.size()];
    const size_t start = random() % (to.size / 4) * 4;
    const size_t most = std::min(to.size - start, from.size);
    const size_t size = (random() % std::min<size_t>(most, 3 * kMegabyte) + 4) / 4 * 4;
    switch (random() % 6) {
        case 0:
            OK(cuMemsetD32Async(to.at + start, random(), std::min(size, most) / 4, stream));
            break;
        case 1:
            OK(cuMemcpyDtoDAsync_v2(to.at + start, from.at, std::min(size, most) / 4 * 4, stream));
            break;
        case 2:
            OK(cuMemsetD32_v2(to.at + start, random(), std::min(size, most) / 4));
            break;
        case 3: {
            const std::vector<unsigned> host(1024, static_cast<unsigned>(random()));
            OK(cuMemcpyHtoD_v2(to.at + start, host.data(), std::min(most, host.size() * 4)));
            break;
        }
        default:
            launch(set_value, stream, to.at + start, static_cast<unsigned>(random()));
    }
}

// The program's threads: writers of shared memory, and one that allocates, writes and frees its own
// and checks what it reads back.
class Program {
  public:
    explicit Program(unsigned writers) {
        for (unsigned i = 0; i < writers; ++i) {
            CUstream stream = nullptr;
            if (i) OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
            workers_.push_back(
                std::make_unique<Worker>([stream, random = std::mt19937(i)](unsigned) mutable {
                    write_somewhere(random, stream);
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
    CUcontext other = nullptr;
    CUcontext popped = nullptr;
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    for (unsigned i = 0; i < kBuffers; ++i) {
        Buffer buffer{0, i % 3 == 2 ? 6000 : (1 + i) * kMegabyte + i * 4096};
        OK(cuCtxPushCurrent_v2(i % 4 == 3 ? other : context));
        OK(cuMemAlloc_v2(&buffer.at, buffer.size));
        OK(cuMemsetD8_v2(buffer.at, static_cast<unsigned char>(i + 1), buffer.size));
        OK(cuCtxSynchronize());
        OK(cuCtxPopCurrent_v2(&popped));
        shared.push_back(buffer);
    }
    OK(cuCtxEnablePeerAccess(other, 0));
}

void free_buffers() {
    for (const Buffer& buffer : shared) OK(cuMemFree_v2(buffer.at));
    shared.clear();
}

// Everything is saved right, with whatever number of slots, while several threads write.
void all_is_saved_right(Client& client) {
    make_buffers();
    unsigned shadowed = 0;
    uint64_t waits = 0;
    {
        Program program(4);
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
