// The gate closed on running code, again and again, while what runs depends on what is held.
#include <deque>
#include <functional>
#include <mutex>

#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

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

// Serves threads in the order in which they came. With an unfair lock, a thread that takes it again
// at once would keep it from the callback below for as long as the machine is busy.
class FairLock {
  public:
    void lock() {
        const unsigned mine = next_++;
        while (served_ != mine) usleep(50);
    }
    void unlock() { ++served_; }

  private:
    std::atomic<unsigned> next_{0};
    std::atomic<unsigned> served_{0};
};

// A host callback needs a lock that a thread holds while it is held at the gate.
void callbacks_that_need_a_lock(Client& client) {
    CUstream stream = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 4096));
    static FairLock lock;
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

// What makes or changes a graph is told addresses, which the driver wants mapped.
void graphs_are_made_with_an_open_gate(Client& client) {
    CUgraph graph = nullptr;
    CUgraphExec made = nullptr;
    CUgraphNode fill = nullptr;
    CUgraphNode copy = nullptr;
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 8192));
    OK(cuGraphCreate(&graph, 0));
    CUDA_MEMSET_NODE_PARAMS filling{memory, 0, 7, 4, 16, 1};
    CUDA_MEMCPY3D_v2 copying{};
    copying.srcMemoryType = copying.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copying.srcDevice = memory;
    copying.dstDevice = memory + 4096;
    copying.WidthInBytes = 64;
    copying.Height = copying.Depth = 1;
    CUgraphExecUpdateResultInfo outcome{};
    const std::function<CUresult()> steps[] = {
        [&] { return cuGraphAddMemsetNode(&fill, graph, nullptr, 0, &filling, context); },
        [&] { return cuGraphAddMemcpyNode(&copy, graph, &fill, 1, &copying, context); },
        [&] { return cuGraphMemsetNodeSetParams(fill, &filling); },
        [&] { return cuGraphMemcpyNodeSetParams(copy, &copying); },
        [&] { return cuGraphInstantiateWithFlags(&made, graph, 0); },
        [&] { return cuGraphExecMemsetNodeSetParams(made, fill, &filling, context); },
        [&] { return cuGraphExecMemcpyNodeSetParams(made, copy, &copying, context); },
        [&] { return cuGraphExecUpdate_v2(made, graph, &outcome); },
    };
    for (const auto& step : steps) {
        CHECK(client.close_gate(kDeadline));
        std::atomic<bool> done{false};
        std::thread caller([&] {
            OK(cuCtxSetCurrent(context));
            OK(step());
            done = true;
        });
        usleep(20000);
        CHECK(!done);
        client.open_gate();
        caller.join();
    }
    OK(cuGraphLaunch(made, nullptr));
    unsigned value = 0;
    OK(cuMemcpyDtoH_v2(&value, memory + 4096 + 60, 4));
    CHECK(value == 7);
    OK(cuGraphExecDestroy(made));
    OK(cuGraphDestroy(graph));
    OK(cuMemFree_v2(memory));
}

// While the gate is sealed no thread is in the driver, and they go on when it opens.
void threads_that_poll(Client& client) {
    CUstream stream = nullptr;
    CUevent event = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cuEventRecord(event, stream));
    OK(cuStreamSynchronize(stream));
    const auto poll = [=](unsigned step) {
        OK(step % 2 ? cuStreamQuery(stream) : cuEventQuery(event));
        if (step % 16 == 0) OK(cuStreamSynchronize(stream));
    };
    std::deque<Worker> workers;
    for (int i = 0; i < 8; ++i) workers.emplace_back(poll);
    const auto polls = [&] {
        uint64_t sum = 0;
        for (const Worker& worker : workers) sum += worker.done;
        return sum;
    };
    CHECK(client.ask(wire::Type::seal_gate).status == wire::Status::wrong_state);
    for (int time = 0; time < 20; ++time) {
        CHECK(client.close_gate(kDeadline));
        for (Worker& worker : workers) worker.more(1);  // as yet they go on
        while (client.seal_gate()) usleep(100);
        usleep(5000);  // those that have come back note it
        const uint64_t before = polls();
        usleep(2000);
        CHECK(polls() == before);
        client.open_gate();
        for (Worker& worker : workers) worker.more(1);
    }
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    start_workload();
    Client client(getpid());
    under_load(client);
    kernels_that_wait_for_launches(client);
    streams_that_wait_for_values(client);
    callbacks_that_need_a_lock(client);
    a_capture_survives(client);
    graphs_are_made_with_an_open_gate(client);
    threads_that_poll(client);
    std::puts("ok");
}
