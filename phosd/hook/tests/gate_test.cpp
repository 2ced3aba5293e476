// The gate closed on running code, again and again, while what runs depends on what is held.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "check.h"

using namespace phos;
using namespace phos::test;

namespace {

constexpr uint32_t kDeadline = 4000;

const char* const kKernels = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry wait_for(.param .u64 flag, .param .u32 value)
{
    .reg .pred %p;
    .reg .b32 %want, %now;
    .reg .b64 %at;
    ld.param.u64 %at, [flag];
    ld.param.u32 %want, [value];
again:
    ld.volatile.global.u32 %now, [%at];
    setp.lt.u32 %p, %now, %want;
    @%p bra again;
    ret;
}
.visible .entry set(.param .u64 flag, .param .u32 value)
{
    .reg .b32 %want;
    .reg .b64 %at;
    ld.param.u64 %at, [flag];
    ld.param.u32 %want, [value];
    st.volatile.global.u32 [%at], %want;
    ret;
}
)";

CUcontext context;
CUfunction wait_for;
CUfunction set_value;

void launch(CUfunction function, CUstream stream, CUdeviceptr flag, unsigned value) {
    void* parameters[] = {&flag, &value};
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
}

// A thread of the program that repeats one step until it is told to stop.
class Worker {
  public:
    template <class Step>
    explicit Worker(Step step)
        : thread_([this, step]() mutable {
              OK(cuCtxSetCurrent(context));
              while (!stop_) {
                  step(++steps);
                  ++done;
              }
          }) {}
    ~Worker() {
        stop_ = true;
        thread_.join();
    }
    void more(uint64_t count) {
        const uint64_t goal = done + count;
        for (int i = 0; done < goal; ++i) {
            CHECK(i < 20000);
            usleep(1000);
        }
    }
    std::atomic<uint64_t> done{0};
    unsigned steps = 0;

  private:
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

// Closes the gate at random instants; each time it closes, or gives up in time, and the program
// goes on. How often it closed.
int close_often(Client& client, int times, bool park, std::vector<Worker*> workers) {
    std::mt19937 random(7);
    int closed = 0;
    for (int i = 0; i < times; ++i) {
        usleep(random() % 3000);
        const auto began = std::chrono::steady_clock::now();
        const bool settled = client.close_gate(kDeadline);
        const auto took = std::chrono::steady_clock::now() - began;
        CHECK(took < std::chrono::milliseconds(kDeadline + 500));
        if (!settled) continue;
        ++closed;
        if (park && i % 4 == 0) {
            const auto held = client.export_all();
            client.park();
            client.unpark(held);
            for (const auto& [id, descriptor] : held) close(descriptor);
            // What came back cannot be exported again; it must not stay so for the next round.
            CHECK(client.ask(wire::Type::rehome).status == wire::Status::ok);
        }
        if (i % 50 == 0) {
            // A step whose calls were over may still be counted, but none begins.
            std::vector<uint64_t> before;
            for (const Worker* worker : workers) before.push_back(worker->done);
            usleep(5000);
            for (size_t w = 0; w < workers.size(); ++w) CHECK(workers[w]->done <= before[w] + 1);
        }
        client.open_gate();
    }
    for (Worker* worker : workers) worker->more(3);
    return closed;
}

void under_load(Client& client) {
    CUstream stream = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr kept = 0;
    OK(cuMemAlloc_v2(&kept, 1 << 20));
    Worker copies([kept](unsigned step) {
        unsigned value = 0;
        OK(cuMemsetD32_v2(kept, step, 1 << 18));
        OK(cuMemcpyDtoH_v2(&value, kept + 4096, 4));
        CHECK(value == step);
    });
    Worker streams([stream](unsigned step) {
        CUdeviceptr at = 0;
        unsigned value = 0;
        OK(cuMemAllocAsync(&at, 100000 + step % 7 * 50000, stream));
        OK(cuMemsetD32Async(at, step, 20000, stream));
        OK(cuMemcpyDtoHAsync_v2(&value, at + 4, 4, stream));
        OK(cuMemFreeAsync(at, stream));
        OK(cuStreamSynchronize(stream));
        CHECK(value == step);
    });
    Worker allocations([](unsigned step) {
        CUdeviceptr small = 0;
        CUdeviceptr large = 0;
        unsigned value = 0;
        OK(cuMemAlloc_v2(&small, 300 + step % 1000));
        OK(cuMemAlloc_v2(&large, 3 << 20));
        OK(cuMemsetD32_v2(small, step, 60));
        OK(cuMemcpyDtoD_v2(large + 512, small, 240));
        OK(cuMemcpyDtoH_v2(&value, large + 512 + 236, 4));
        CHECK(value == step);
        OK(cuMemFree_v2(small));
        OK(cuMemFree_v2(large));
    });
    const int closed = close_often(client, 500, true, {&copies, &streams, &allocations});
    std::printf("under load: closed %d of 500\n", closed);
    CHECK(closed >= 490);
}

// A kernel on one stream spins for a kernel that another thread launches.
void kernels_that_wait_for_launches(Client& client) {
    CUdeviceptr flag = 0;
    CUstream one = nullptr;
    CUstream two = nullptr;
    OK(cuMemAlloc_v2(&flag, 4));
    OK(cuMemsetD32_v2(flag, 0, 1));
    OK(cuCtxSynchronize());  // the streams below do not wait for the memset
    OK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
    std::atomic<unsigned> waiting{0};
    std::atomic<bool> ended{false};
    std::thread setter([&] {
        OK(cuCtxSetCurrent(context));
        for (unsigned next = 1; !ended;) {
            if (waiting < next) continue;
            launch(set_value, two, flag, next++);
        }
    });
    {
        Worker waiter([&](unsigned step) {
            launch(wait_for, one, flag, step);
            waiting = step;
            OK(cuStreamSynchronize(one));
        });
        const int closed = close_often(client, 60, false, {&waiter});
        std::printf("kernels that wait for launches: closed %d of 60\n", closed);
        CHECK(closed >= 55);
    }
    ended = true;
    setter.join();
    OK(cuMemFree_v2(flag));
}

// A stream waits for a value that another thread writes on its own stream.
void streams_that_wait_for_values(Client& client) {
    CUdeviceptr flag = 0;
    CUstream one = nullptr;
    CUstream two = nullptr;
    OK(cuMemAlloc_v2(&flag, 4));
    OK(cuMemsetD32_v2(flag, 0, 1));
    OK(cuCtxSynchronize());  // the streams below do not wait for the memset
    OK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
    std::atomic<unsigned> waiting{0};
    std::atomic<bool> ended{false};
    std::thread writer([&] {
        OK(cuCtxSetCurrent(context));
        for (unsigned next = 1; !ended;) {
            if (waiting < next) {
                usleep(50);
                continue;
            }
            OK(cuStreamWriteValue32_v2(two, flag, next++, 0));
        }
    });
    {
        Worker waiter([&](unsigned step) {
            OK(cuStreamWaitValue32_v2(one, flag, step, CU_STREAM_WAIT_VALUE_GEQ));
            waiting = step;
            OK(cuStreamSynchronize(one));
        });
        const int closed = close_often(client, 60, false, {&waiter});
        std::printf("streams that wait for values: closed %d of 60\n", closed);
        CHECK(closed >= 55);
    }
    ended = true;
    writer.join();
    OK(cuMemFree_v2(flag));
}

// A host callback needs a lock that a thread holds while it is held at the gate.
void callbacks_that_need_a_lock(Client& client) {
    CUstream stream = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 4096));
    static std::mutex lock;
    Worker caller([stream](unsigned) {
        OK(cuLaunchHostFunc(stream, [](void*) { const std::lock_guard held(lock); }, nullptr));
        OK(cuStreamSynchronize(stream));
    });
    Worker holder([memory](unsigned step) {
        const std::lock_guard held(lock);
        unsigned value = 0;
        OK(cuMemsetD32_v2(memory, step, 4));
        OK(cuMemcpyDtoH_v2(&value, memory, 4));
        CHECK(value == step);
    });
    const int closed = close_often(client, 60, false, {&caller, &holder});
    std::printf("callbacks that need a lock: closed %d of 60\n", closed);
    CHECK(closed >= 55);
}

void a_capture_survives(Client& client) {
    CUstream stream = nullptr;
    CUdeviceptr memory = 0;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&memory, 4096));
    for (const CUstreamCaptureMode mode :
         {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
        OK(cuStreamBeginCapture_v2(stream, mode));
        wire::GateState state{};
        CHECK(!client.close_gate(60, &state));  // it never settles on a capture
        CHECK(state.capturing == 1);
        OK(cuMemsetD32Async(memory, 42, 16, stream));
        CUgraph graph = nullptr;
        OK(cuStreamEndCapture(stream, &graph));
        CUgraphExec executable = nullptr;
        OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
        CHECK(client.close_gate(kDeadline, &state));
        CHECK(state.capturing == 0);
        client.open_gate();
        OK(cuGraphLaunch(executable, stream));
        OK(cuStreamSynchronize(stream));
        unsigned value = 0;
        OK(cuMemcpyDtoH_v2(&value, memory + 8, 4));
        CHECK(value == 42);
        OK(cuGraphExecDestroy(executable));
        OK(cuGraphDestroy(graph));
    }
    OK(cuMemFree_v2(memory));
}

void the_deadline_opens() {
    CUstream stream = nullptr;
    CUdeviceptr flag = 0;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&flag, 4));
    OK(cuMemsetD32_v2(flag, 0, 1));
    OK(cuCtxSynchronize());  // the streams below do not wait for the memset
    launch(wait_for, stream, flag, 1);
    Client client(getpid());
    const auto began = std::chrono::steady_clock::now();
    CHECK(!client.close_gate(200));
    const auto took = std::chrono::steady_clock::now() - began;
    CHECK(took >= std::chrono::milliseconds(200) && took < std::chrono::milliseconds(700));
    CHECK(client.hello().state == static_cast<uint32_t>(wire::State::running));
    CUstream other = nullptr;
    OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    launch(set_value, other, flag, 1);
    OK(cuStreamSynchronize(stream));
    OK(cuMemFree_v2(flag));
}

void a_lost_client_opens() {
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 4096));
    Worker worker([memory](unsigned step) { OK(cuMemsetD32_v2(memory, step, 16)); });
    auto client = std::make_unique<Client>(getpid());
    CHECK(client->close_gate(kDeadline));
    Client other(getpid());
    const wire::CloseGate request{100, 0};
    CHECK(other.ask(wire::Type::close_gate, &request, sizeof request).status ==
          wire::Status::wrong_state);
    client.reset();
    worker.more(5);
    CHECK(other.hello().state == static_cast<uint32_t>(wire::State::running));
}

void a_detached_hook_is_woken() {
    const std::string base =
        std::string(std::getenv("PHOS_RUNTIME_DIR")) + "/hook/" + std::to_string(getpid());
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 4096));
    OK(cuMemsetD32_v2(memory, 1234, 1024));
    Client client(getpid());
    CHECK(client.close_gate(kDeadline));
    const auto held = client.export_all();
    client.park();
    CHECK(client.ask(wire::Type::detach).status == wire::Status::ok);
    CHECK(access((base + ".sock").c_str(), F_OK) != 0);
    usleep(20000);
    CHECK(access((base + ".sock").c_str(), F_OK) != 0);
    close(open((base + ".wake").c_str(), O_CREAT | O_WRONLY, 0600));
    Client again(getpid());
    unlink((base + ".wake").c_str());
    CHECK(again.hello().state == static_cast<uint32_t>(wire::State::parked));
    again.unpark(held);
    again.open_gate();
    unsigned value = 0;
    OK(cuMemcpyDtoH_v2(&value, memory + 400, 4));
    CHECK(value == 1234);
    OK(cuMemFree_v2(memory));
}

unsigned open_sockets() {
    unsigned count = 0;
    DIR* folder = opendir("/proc/self/fd");
    while (const dirent* entry = readdir(folder)) {
        struct stat info{};
        if (stat((std::string("/proc/self/fd/") + entry->d_name).c_str(), &info) == 0)
            count += S_ISSOCK(info.st_mode);
    }
    closedir(folder);
    return count;
}

// The child's calls go straight to the driver, and it holds none of the hook's sockets.
void a_forked_child_is_left_alone(Client& client) {
    CHECK(client.close_gate(kDeadline));
    const unsigned before = open_sockets();
    const pid_t child = fork();
    if (child == 0) {
        CUdeviceptr memory = 0;
        alarm(10);
        const CUresult result = cuMemAlloc_v2(&memory, 4096);
        _exit(result != CUDA_SUCCESS && open_sockets() < before ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    client.open_gate();
}

void bad_messages_end_only_the_connection() {
    for (const wire::Header header :
         {wire::Header{1, wire::kVersion, 1, 0, 0, 0, 0},
          wire::Header{wire::kMagic, 9, 1, 0, 0, 0, 0},
          wire::Header{wire::kMagic, wire::kVersion, 1, 0, 0, wire::kMaxPayload + 1, 0},
          wire::Header{wire::kMagic, wire::kVersion, 1, 0, 0, 0, 3}}) {
        Client client(getpid());
        CHECK(write(client.socket, &header, sizeof header) == sizeof header);
        char byte = 0;
        CHECK(read(client.socket, &byte, 1) == 0);
    }
    Client unknown(getpid());
    CHECK(unknown.ask(static_cast<wire::Type>(77)).status == wire::Status::bad_message);
    Client client(getpid());
    CHECK(client.ask(wire::Type::list_blocks).status == wire::Status::bad_message);
    CHECK(Client(getpid()).hello().pid == static_cast<uint32_t>(getpid()));
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    context = start_cuda();
    CUmodule module = nullptr;
    OK(cuModuleLoadData(&module, kKernels));
    OK(cuModuleGetFunction(&wait_for, module, "wait_for"));
    OK(cuModuleGetFunction(&set_value, module, "set"));
    {
        Client client(getpid());
        under_load(client);
        kernels_that_wait_for_launches(client);
        streams_that_wait_for_values(client);
        callbacks_that_need_a_lock(client);
        a_capture_survives(client);
        a_forked_child_is_left_alone(client);
    }
    the_deadline_opens();
    a_lost_client_opens();
    a_detached_hook_is_woken();
    bad_messages_end_only_the_connection();
    std::puts("ok");
}
