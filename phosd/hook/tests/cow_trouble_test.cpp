// What may go wrong while chunks are being saved: a job that ends too early, memory that goes or
// runs out.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "fake_mover.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kChunk = board::kChunk;

// Seconds that the hook waits for an engine, at each level.
const char* const set_patience = std::getenv("PHOS_TEST_PATIENCE");
const double patience_of_hook = set_patience ? std::atof(set_patience) / 1000 : 3;

// "At once" is what takes clearly less than that.
const double at_once = patience_of_hook / 2;

double seconds_since(Clock::time_point began) {
    return std::chrono::duration<double>(Clock::now() - began).count();
}

// A thread that overwrites memory for which there is no slot, and so waits.
class Writer {
  public:
    explicit Writer(CUdeviceptr at)
        : thread_([this, at] {
              OK(cuCtxSetCurrent(context));
              OK(cuMemsetD32_v2(at, 77, 16));
              done = true;
          }) {}
    ~Writer() { thread_.join(); }
    std::atomic<bool> done{false};

  private:
    std::thread thread_;
};

void wait_for(const std::function<bool()>& condition) {
    for (int i = 0; !condition(); ++i) {
        CHECK(i < 10000);
        usleep(1000);
    }
}

// Whatever ends the job lets the waiting thread go on at once.
void the_end_of_a_job_lets_go() {
    const CUdeviceptr memory = filled(2, 5);
    enum { aborted, disarmed, forgotten, lost };
    for (const int end : {aborted, disarmed, forgotten, lost}) {
        auto client = std::make_unique<Client>(getpid());
        close_gate(*client);
        FakeMover mover(*client, {0});
        CHECK(count_of(mover.arm(*client)) == mover.board().chunk_count());
        client->open_gate();
        Writer writer(memory + kChunk);
        wait_for([&] { return mover.board().header().posted > 0; });
        usleep(50000);
        CHECK(!writer.done);
        const auto began = Clock::now();
        if (end == aborted) mover.board().set_phase(board::aborted);
        if (end == disarmed) count_of(client->ask(wire::Type::disarm));
        if (end == forgotten) CHECK(client->ask(wire::Type::forget).status == wire::Status::ok);
        if (end == lost) client.reset();
        wait_for([&] { return writer.done.load(); });
        CHECK(seconds_since(began) < at_once);
        if (end == lost) CHECK(mover.board().header().phase == board::aborted);
        CHECK(mover.board().header().waits == 1 || end == forgotten || end == lost);
        Client after(getpid());
        CHECK(after.ask(wire::Type::forget).status == wire::Status::ok);
    }
    CHECK(value_at(memory + kChunk) == 77);
    OK(cuMemFree_v2(memory));
}

// A gate that must close on a thread which waits for a mover gives up in time; and while a board is
// armed nothing can be parked, nor another board be armed.
void the_gate_gives_up_on_a_waiting_thread(Client& client) {
    const CUdeviceptr memory = filled(1, 5);
    close_gate(client);
    FakeMover mover(client, {0});
    count_of(mover.arm(client));
    CHECK(client.ask(wire::Type::park).status == wire::Status::wrong_state);
    CHECK(mover.arm(client).status == wire::Status::wrong_state);
    client.open_gate();
    Writer writer(memory);
    wait_for([&] { return mover.board().header().posted > 0; });
    const auto began = Clock::now();
    CHECK(!client.close_gate(100));
    CHECK(seconds_since(began) < at_once);
    Pace pace;
    pace.only_urgent = true;
    mover.start(pace);
    wait_for([&] { return writer.done.load(); });
    mover.stop();
    mover.start({});
    CHECK(mover.wait_saved());
    mover.stop();
    CHECK(mover.wrong() == 0);
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    OK(cuMemFree_v2(memory));
}

// Freed memory is told, and its chunks are saved as they were; what was mapped there before is no
// block of the board any more.
void freed_blocks_are_told_and_saved(Client& client) {
    const CUdeviceptr kept = filled(2, 1);
    const CUdeviceptr gone = filled(3, 2);
    close_gate(client);
    FakeMover mover(client, {8});
    count_of(mover.arm(client));
    client.open_gate();
    OK(cuMemsetD32_v2(gone + kChunk, 9, 4));  // one chunk of it is shadowed before
    OK(cuMemFree_v2(gone));
    const CUdeviceptr anew = filled(3, 4);  // perhaps at the same address
    OK(cuMemsetD32_v2(kept, 8, 4));
    const auto& header = mover.board().header();
    CHECK(header.freed_posted == 1);
    OK(cuMemFree_v2(anew));
    CHECK(header.freed_posted == 1);  // nobody else has it
    mover.start({});
    CHECK(mover.wait_saved());
    mover.stop();
    CHECK(mover.wrong() == 0);
    CHECK(count_of(client.ask(wire::Type::disarm)) == 2);
    OK(cuMemFree_v2(kept));
    CHECK(header.freed_posted == 2);
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
}

size_t free_memory() {
    size_t free = 0;
    size_t total = 0;
    OK(cuMemGetInfo_v2(&free, &total));
    return free;
}

// An allocation that fails without waiting for anybody. The quickest of three, since others work on
// this machine too.
void fails_at_once(size_t size) {
    double quickest = patience_of_hook;
    for (int i = 0; i < 3; ++i) {
        CUdeviceptr none = 0;
        const auto began = Clock::now();
        CHECK(cuMemAlloc_v2(&none, size) == CUDA_ERROR_OUT_OF_MEMORY);
        quickest = std::min(quickest, seconds_since(began));
    }
    CHECK(quickest < at_once);
}

// The program frees and allocates nearly all of the device: slots and what was freed give way, and
// only if that is not enough, the job. This mover ends with its job and does not answer then.
void a_full_device_is_the_jobs_trouble(Client& client, bool give_up) {
    const size_t all = free_memory() / kChunk;
    const size_t half = all / 2 - 4;
    const CUdeviceptr first = filled(half, 1);
    const CUdeviceptr second = filled(half - 8, 2);
    close_gate(client);
    FakeMover mover(client, {12});
    count_of(mover.arm(client));
    Pace pace;
    pace.only_urgent = true;
    pace.answers_without_doing = give_up;
    mover.start(pace);
    client.open_gate();
    OK(cuMemFree_v2(first));
    CUdeviceptr anew = 0;
    if (give_up) {
        // Only the slabs are let go of. That is enough for what is too large otherwise.
        fails_at_once(2 * all * kChunk);
        CHECK(mover.board().header().phase == board::armed);  // nothing would have helped
        CHECK(cuMemAlloc_v2(&anew, half * kChunk) == CUDA_ERROR_OUT_OF_MEMORY);
        CHECK(mover.board().header().phase == board::aborted);
    } else {
        const auto began = Clock::now();
        OK(cuMemAlloc_v2(&anew, half * kChunk));
        CHECK(seconds_since(began) < patience_of_hook);
        CHECK(mover.board().header().phase == board::armed);
        OK(cuMemFree_v2(anew));
    }
    for (const board::Pressure& pressure : mover.board().header().pressure)
        CHECK(pressure.wanted == 0 && pressure.given == 0);
    mover.stop();
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    OK(cuMemFree_v2(second));
}

// Afterwards an allocation waits for the engine to let go of what was freed; not for one that is
// not there any more.
void a_watched_board_is_waited_for(Client& client, bool alive) {
    const size_t all = free_memory() / kChunk;
    const size_t size = (all - 16) * kChunk;
    const CUdeviceptr memory = filled(all - 16, 1);
    close_gate(client);
    FakeMover mover(client, {});
    mover.board().set_phase(board::watched);
    count_of(mover.arm(client));
    client.open_gate();
    std::thread engine([&] {
        while (alive && !mover.board().header().freed_posted) usleep(1000);
        usleep(100000);
        if (alive) mover.let_go_of_freed();
    });
    OK(cuMemsetD32_v2(memory, 7, 1));
    CHECK(mover.board().header().submissions == 0);  // nothing is armed
    OK(cuMemFree_v2(memory));
    CUdeviceptr anew = 0;
    const auto began = Clock::now();
    const CUresult result = cuMemAlloc_v2(&anew, size);
    engine.join();
    CHECK(result == (alive ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY));
    if (alive) {
        OK(cuMemFree_v2(anew));
        CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    } else {
        CHECK(seconds_since(began) >= patience_of_hook);
        fails_at_once(size);  // nobody waits again
    }
}

// What the engine holds beside is waited for while it is given back by itself; when that takes too
// long all of it is asked for. It is nothing to wait for when it would not be enough.
void what_is_held_beside_is_waited_for(Client& client, bool in_time) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    const CUdeviceptr other = filled(1, 1);
    const size_t part = (free_memory() / kChunk / 2 - 8) * kChunk;
    const size_t size = 2 * part;
    close_gate(client);
    FakeMover mover(client, {});
    auto& header = mover.board().header();
    mover.board().set_phase(board::watched);
    CUmemGenericAllocationHandle half[2] = {};
    for (auto& handle : half) OK(DIRECT(cuMemCreate)(&handle, part, &properties, 0));
    header.held[0] = size;
    count_of(mover.arm(client));
    client.open_gate();
    fails_at_once(2 * size);
    std::thread engine([&] {
        while (!in_time && header.pressure[0].wanted < board::kGiveUp) usleep(1000);
        for (auto& handle : half) {
            usleep(in_time ? 100000 : 20000);
            OK(DIRECT(cuMemRelease)(handle));
            header.held[0] -= part;
        }
    });
    CUdeviceptr anew = 0;
    const auto began = Clock::now();
    OK(cuMemAlloc_v2(&anew, size));
    engine.join();
    CHECK(in_time == (seconds_since(began) < 2 * patience_of_hook));  // of the first two levels
    CHECK(header.pressure[0].wanted == 0 && header.phase == board::watched);
    OK(cuMemFree_v2(anew));
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    OK(cuMemFree_v2(other));
}

// Nobody waits a second time for who has not given back what it held.
void who_gives_nothing_back_is_waited_for_once(Client& client) {
    const CUdeviceptr other = filled(1, 1);
    const size_t size = 2 * (free_memory() / kChunk - 16) * kChunk;
    auto engine = std::make_unique<Client>(getpid());
    FakeMover mover(*engine, {});
    mover.board().set_phase(board::watched);
    mover.board().header().held[0] = size;
    count_of(mover.arm(*engine));
    engine.reset();
    CUdeviceptr anew = 0;
    CHECK(cuMemAlloc_v2(&anew, size) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(mover.board().header().held[0] == 0);
    fails_at_once(size);
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    OK(cuMemFree_v2(other));
}

}  // namespace

// `out`: what takes until the hook's patience has run out, of which there is less then.
int main(int count, char** arguments) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    start_workload();
    Client client(getpid());
    if (count > 1 && std::strcmp(arguments[1], "out") == 0) {
        a_full_device_is_the_jobs_trouble(client, true);
        a_watched_board_is_waited_for(client, false);
        what_is_held_beside_is_waited_for(client, false);
        who_gives_nothing_back_is_waited_for_once(client);
        std::puts("ok");
        return 0;
    }
    the_end_of_a_job_lets_go();
    std::puts("ends");
    the_gate_gives_up_on_a_waiting_thread(client);
    freed_blocks_are_told_and_saved(client);
    std::puts("frees");
    a_full_device_is_the_jobs_trouble(client, false);
    a_watched_board_is_waited_for(client, true);
    what_is_held_beside_is_waited_for(client, true);
    std::puts("ok");
}
