// Interprocess events between two processes under the hook.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "intercept/legacy_ipc.h"
#include "memory/event_words.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;
using legacy_ipc::Ticket;

namespace {

constexpr unsigned kFlags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
constexpr unsigned kStreams = 40;  // more than an event has counters

CUipcEventHandle as_handle(const Ticket& ticket) {
    CUipcEventHandle handle{};
    std::memcpy(&handle, &ticket, sizeof ticket);
    return handle;
}

Ticket as_ticket(const CUipcEventHandle& handle) {
    Ticket ticket{};
    std::memcpy(&ticket, &handle, sizeof ticket);
    return ticket;
}

// Streams, each with a flag that its work can be made to wait for.
struct Streams {
    std::vector<CUstream> streams{kStreams};
    CUdeviceptr flags = 0;
    std::vector<unsigned> rounds = std::vector<unsigned>(kStreams);

    Streams() {
        OK(cuMemAlloc_v2(&flags, kStreams * 4));
        OK(cuMemsetD32_v2(flags, 0, kStreams));
        for (CUstream& stream : streams) OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    }
    void hold(unsigned i) {
        OK(cuStreamWaitValue32_v2(streams[i], flags + 4 * i, ++rounds[i],
                                  CU_STREAM_WAIT_VALUE_GEQ));
    }
    void let_go(unsigned i) { OK(cuMemsetD32_v2(flags + 4 * i, rounds[i], 1)); }
    // Whether all work comes to its end, which may take a busy machine long; and whether it does
    // not, for which a moment has to do.
    bool done(unsigned i) { return comes_to_its_end(i, 20000); }
    bool held(unsigned i) { return !comes_to_its_end(i, 5); }

  private:
    bool comes_to_its_end(unsigned i, int tries) {
        for (; tries; --tries, usleep(1000))
            if (cuStreamQuery(streams[i]) == CUDA_SUCCESS) return true;
        return false;
    }
};

// What the peer is asked to do with its event, and answers with a result.
struct Order {
    enum What {
        make,
        share,
        open,
        record,
        hold,
        let_go,
        wait,
        query,
        synchronize,
        destroy,
        done,
        held
    };
    What what;
    unsigned stream_number;
    CUipcEventHandle handle;
};
struct Answer {
    CUresult result;
    CUipcEventHandle handle;
};

void serve(int socket) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    start_workload();
    Streams mine;
    CUevent event = nullptr;
    Order order;
    while (read(socket, &order, sizeof order) == sizeof order) {
        const unsigned i = order.stream_number;
        Answer answer{};
        switch (order.what) {
            case Order::make:
                answer.result = cuEventCreate(&event, kFlags);
                break;
            case Order::share:
                answer.result = cuIpcGetEventHandle(&answer.handle, event);
                break;
            case Order::open:
                answer.result = cuIpcOpenEventHandle(&event, order.handle);
                break;
            case Order::record:
                answer.result = cuEventRecord(event, mine.streams[i]);
                break;
            case Order::hold:
                mine.hold(i);
                break;
            case Order::let_go:
                mine.let_go(i);
                break;
            case Order::wait:
                answer.result = cuStreamWaitEvent(mine.streams[i], event, 0);
                break;
            case Order::query:
                answer.result = cuEventQuery(event);
                break;
            case Order::synchronize:
                answer.result = cuEventSynchronize(event);
                break;
            case Order::destroy:
                answer.result = cuEventDestroy_v2(event);
                break;
            case Order::done:
                answer.result = mine.done(i) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
                break;
            case Order::held:
                answer.result = mine.held(i) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
        }
        CHECK(write(socket, &answer, sizeof answer) == sizeof answer);
    }
    _exit(0);
}

class Peer {
  public:
    Peer() {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            close(ends[0]);
            serve(ends[1]);
        }
        close(ends[1]);
        socket_ = ends[0];
    }
    CUresult tell(Order::What what, unsigned stream = 0, CUipcEventHandle handle = {}) {
        const Order order{what, stream, handle};
        Answer answer;
        CHECK(write(socket_, &order, sizeof order) == sizeof order);
        CHECK(read(socket_, &answer, sizeof answer) == sizeof answer);
        shared = answer.handle;
        return answer.result;
    }
    CUevent opened() {
        CUevent event = nullptr;
        OK(tell(Order::share));
        OK(cuIpcOpenEventHandle(&event, shared));
        return event;
    }
    void end() {
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, nullptr, 0) == pid);
        close(socket_);
    }
    int pid;
    CUipcEventHandle shared{};

  private:
    int socket_;
};

void alone(Streams& mine) {
    CUevent event = nullptr;
    CHECK(cuEventCreate(nullptr, kFlags) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuEventCreate(&event, CU_EVENT_INTERPROCESS) != CUDA_SUCCESS);
    OK(cuEventCreate(&event, kFlags | CU_EVENT_BLOCKING_SYNC));
    OK(cuEventQuery(event));
    OK(cuStreamWaitEvent(mine.streams[0], event, 0));
    mine.hold(0);
    OK(cuEventRecord(event, mine.streams[0]));
    CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    OK(cuStreamWaitEvent(mine.streams[1], event, 0));
    CHECK(mine.held(1));
    mine.let_go(0);
    OK(cuEventSynchronize(event));
    CHECK(mine.done(1));
    OK(cuEventRecordWithFlags(event, mine.streams[2], CU_EVENT_RECORD_EXTERNAL));
    OK(cuEventRecord_ptsz(event, nullptr));
    OK(cuStreamWaitEvent_ptsz(nullptr, event, 0));
    OK(cuEventRecord(event, nullptr));
    OK(cuEventSynchronize(event));
    float time = 0;
    CHECK(cuEventElapsedTime(&time, event, event) == CUDA_ERROR_INVALID_HANDLE);
    CUipcEventHandle handle{};
    OK(cuIpcGetEventHandle(&handle, event));
    CUevent same = nullptr;
    CHECK(cuIpcGetEventHandle(nullptr, event) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuIpcOpenEventHandle(&same, handle) == CUDA_ERROR_INVALID_CONTEXT);
    OK(cuEventDestroy_v2(event));
    CHECK(cuEventRecord(event, mine.streams[0]) != CUDA_SUCCESS);
    CUevent plain = nullptr;
    OK(cuEventCreate(&plain, CU_EVENT_DISABLE_TIMING));
    CHECK(cuIpcGetEventHandle(&handle, plain) != CUDA_SUCCESS);
    OK(cuEventDestroy_v2(plain));
}

void records_of_a_peer(Peer& peer, Streams& mine) {
    OK(peer.tell(Order::make));
    CUevent event = peer.opened();
    OK(cuEventQuery(event));
    OK(cuStreamWaitEvent(mine.streams[0], event, 0));
    CHECK(mine.done(0));

    // A wait is for the record that is the latest when it is asked for.
    OK(peer.tell(Order::hold, 0));
    OK(peer.tell(Order::record, 0));
    CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    OK(cuStreamWaitEvent(mine.streams[0], event, 0));
    OK(peer.tell(Order::hold, 1));
    OK(peer.tell(Order::record, 1));
    OK(cuStreamWaitEvent(mine.streams[1], event, 0));
    CHECK(mine.held(0) && mine.held(1));
    OK(peer.tell(Order::let_go, 0));
    CHECK(mine.done(0) && mine.held(1));
    CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    std::atomic<bool> reached{false};
    std::thread waiting([&] {
        OK(cuCtxSetCurrent(context));
        OK(cuEventSynchronize(event));
        reached = true;
    });
    usleep(20000);
    CHECK(!reached);
    OK(peer.tell(Order::let_go, 1));
    waiting.join();
    CHECK(mine.done(1));
    OK(cuEventQuery(event));

    // An older record that comes last changes nothing.
    OK(peer.tell(Order::hold, 0));
    OK(peer.tell(Order::record, 0));
    OK(peer.tell(Order::record, 1));
    OK(cuEventSynchronize(event));
    OK(cuStreamWaitEvent(mine.streams[0], event, 0));
    CHECK(mine.done(0));
    OK(peer.tell(Order::let_go, 0));
    OK(peer.tell(Order::done, 0));
    OK(cuEventQuery(event));

    // Many on one stream, and on more streams than an event has counters.
    OK(peer.tell(Order::hold, 0));
    for (int i = 0; i < 100; ++i) OK(peer.tell(Order::record, 0));
    CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    OK(peer.tell(Order::let_go, 0));
    OK(cuEventSynchronize(event));
    for (unsigned i = 0; i < kStreams; ++i) {
        OK(peer.tell(Order::hold, i));
        OK(peer.tell(Order::record, i));
        OK(cuStreamWaitEvent(mine.streams[i], event, 0));
    }
    for (unsigned i = 0; i < kStreams; ++i) OK(peer.tell(Order::let_go, i));
    OK(cuEventSynchronize(event));
    for (unsigned i = 0; i < kStreams; ++i) CHECK(mine.done(i));

    // Here it is an event like others, too; and the owner sees what is recorded here.
    mine.hold(0);
    OK(cuEventRecord(event, mine.streams[0]));
    CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    CHECK(peer.tell(Order::query) == CUDA_ERROR_NOT_READY);
    OK(peer.tell(Order::wait, 2));
    OK(peer.tell(Order::held, 2));
    mine.let_go(0);
    OK(peer.tell(Order::synchronize));
    OK(peer.tell(Order::done, 2));
    OK(cuEventQuery(event));

    // Opened twice, it is still one event.
    CUevent again = peer.opened();
    CHECK(again != event);
    OK(cuEventRecord(again, mine.streams[3]));
    OK(cuEventSynchronize(event));
    CUipcEventHandle handle{};
    CHECK(cuIpcGetEventHandle(&handle, again) == CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventDestroy_v2(again));
    OK(cuEventQuery(event));
    OK(cuEventDestroy_v2(event));
    OK(peer.tell(Order::destroy));
}

// The owner destroys its event first; its words are another event's then.
void what_the_owner_destroyed(Peer& peer, Streams& mine) {
    OK(peer.tell(Order::make));
    CUevent event = peer.opened();
    const CUipcEventHandle old = peer.shared;
    OK(peer.tell(Order::hold, 0));
    OK(peer.tell(Order::record, 0));
    OK(cuStreamWaitEvent(mine.streams[0], event, 0));
    OK(peer.tell(Order::destroy));
    OK(peer.tell(Order::let_go, 0));
    CHECK(mine.done(0));
    std::vector<CUevent> others;
    for (int i = 0; i < 20; ++i) {
        OK(peer.tell(Order::make));
        others.push_back(peer.opened());
    }
    OK(peer.tell(Order::hold, 0));
    OK(peer.tell(Order::record, 0));
    OK(cuEventQuery(event));
    OK(cuEventSynchronize(event));
    OK(cuEventRecord(event, mine.streams[1]));
    OK(cuStreamWaitEvent(mine.streams[2], event, 0));
    CHECK(mine.done(2));
    CHECK(cuEventQuery(others.back()) == CUDA_ERROR_NOT_READY);
    OK(peer.tell(Order::let_go, 0));
    OK(cuEventSynchronize(others.back()));
    CUevent stale = nullptr;
    CHECK(cuIpcOpenEventHandle(&stale, old) == CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventDestroy_v2(event));
    for (CUevent other : others) OK(cuEventDestroy_v2(other));
}

void handles_that_are_none(Peer& peer) {
    OK(peer.tell(Order::make));
    OK(peer.tell(Order::share));
    const Ticket good = as_ticket(peer.shared);
    CUevent event = nullptr;
    const auto refused = [&](const Ticket& ticket) {
        return cuIpcOpenEventHandle(&event, as_handle(ticket)) != CUDA_SUCCESS;
    };
    CHECK(cuIpcOpenEventHandle(nullptr, peer.shared) == CUDA_ERROR_INVALID_VALUE);
    for (const uint64_t offset : {good.offset + 8, good.block_size, ~uint64_t{0}, ~uint64_t{127}}) {
        Ticket bad = good;
        bad.offset = offset;
        CHECK(refused(bad));
    }
    Ticket bad = good;
    bad.size = good.size + 128;
    CHECK(refused(bad));
    bad = good;
    bad.generation += 1;
    CHECK(refused(bad));
    bad = good;
    bad.block_size += 2 << 20;
    CHECK(refused(bad));
    bad = good;
    bad.block += 1000;
    CHECK(refused(bad));
    bad = good;
    bad.pid = 0x7fff'fff0;
    CHECK(refused(bad));
    bad = good;
    bad.magic += 1;
    CHECK(refused(bad));
    // An event's words are no memory.
    Ticket memory = good;
    memory.magic = legacy_ipc::kMemoryMagic;
    CUipcMemHandle handle{};
    std::memcpy(&handle, &memory, sizeof memory);
    CUdeviceptr address = 0;
    OK(cuIpcOpenEventHandle(&event, peer.shared));
    CHECK(cuIpcOpenMemHandle_v2(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) !=
          CUDA_SUCCESS);
    OK(cuEventDestroy_v2(event));
    std::minstd_rand random(7);
    for (int i = 0; i < 200; ++i) {
        CUipcEventHandle noise = peer.shared;
        for (int byte = 0; byte < 4; ++byte)
            noise.reserved[random() % sizeof noise.reserved] = static_cast<char>(random());
        if (as_ticket(noise).pid != good.pid || as_ticket(noise).nonce != good.nonce) continue;
        if (cuIpcOpenEventHandle(&event, noise) == CUDA_SUCCESS) OK(cuEventDestroy_v2(event));
    }
    OK(peer.tell(Order::destroy));
}

// A ticket for memory of the device, which the host must not touch.
void memory_is_no_event(Peer& peer) {
    CUdeviceptr memory = 0;
    CUipcMemHandle handle{};
    OK(cuMemAlloc_v2(&memory, 4 << 20));
    OK(cuIpcGetMemHandle(&handle, memory));
    Ticket forged{};
    std::memcpy(&forged, &handle, sizeof forged);
    forged.magic = legacy_ipc::kEventMagic;
    forged.size = event_words::kStride;
    CHECK(peer.tell(Order::open, 0, as_handle(forged)) != CUDA_SUCCESS);
    OK(cuMemFree_v2(memory));
}

void captures(Peer& peer, Streams& mine) {
    OK(peer.tell(Order::make));
    CUevent event = peer.opened();
    CUstream one = mine.streams[0];
    CUstream two = mine.streams[1];
    CUgraph graph = nullptr;
    // Within a capture the event orders streams as any other.
    OK(cuStreamBeginCapture_v2(one, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuEventRecord(event, one));
    OK(cuStreamWaitEvent(two, event, 0));
    OK(cuEventRecord(event, two));
    OK(cuStreamWaitEvent(one, event, 0));
    CHECK(cuEventRecordWithFlags(event, one, CU_EVENT_RECORD_EXTERNAL) == CUDA_ERROR_NOT_SUPPORTED);
    CHECK(cuStreamWaitEvent(one, event, CU_EVENT_WAIT_EXTERNAL) == CUDA_ERROR_NOT_SUPPORTED);
    OK(cuStreamEndCapture(one, &graph));
    OK(peer.tell(Order::query));
    OK(cuEventRecord(event, one));
    OK(cuEventSynchronize(event));
    // What was recorded outside of it must not order what is in it.
    OK(peer.tell(Order::record, 0));
    OK(cuStreamBeginCapture_v2(one, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK(cuStreamWaitEvent(one, event, 0) == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    CUgraph other = nullptr;
    cuStreamEndCapture(one, &other);
    CUgraphNode node = nullptr;
    CHECK(cuGraphAddEventRecordNode(&node, graph, nullptr, 0, event) == CUDA_ERROR_NOT_SUPPORTED);
    CHECK(cuGraphAddEventWaitNode(&node, graph, nullptr, 0, event) == CUDA_ERROR_NOT_SUPPORTED);
    CUgraphNodeParams parameters{};
    parameters.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    parameters.eventRecord.event = event;
    CHECK(cuGraphAddNode_v2(&node, graph, nullptr, nullptr, 0, &parameters) ==
          CUDA_ERROR_NOT_SUPPORTED);
    CHECK(cuCtxRecordEvent(context, event) == CUDA_ERROR_NOT_SUPPORTED);
    OK(cuGraphDestroy(graph));
    OK(cuEventDestroy_v2(event));
    OK(peer.tell(Order::destroy));
}

// The descriptors of a process's blocks: what came back once is not exported again.
struct Held {
    std::vector<std::pair<uint64_t, int>> blocks;

    void take(Client& client) {
        for (const auto& [id, descriptor] : client.export_all()) {
            const auto same = [id = id](const auto& held) { return held.first == id; };
            if (std::none_of(blocks.begin(), blocks.end(), same))
                blocks.emplace_back(id, descriptor);
            else
                close(descriptor);
        }
    }
    ~Held() {
        for (const auto& [id, descriptor] : blocks) close(descriptor);
    }
};

// Both are parked and come back, between the handle and its opening, and between record and wait.
void parked(Client& client, Peer& peer, Streams& mine) {
    Client owner(peer.pid);
    Held here;
    Held there;
    OK(peer.tell(Order::make));
    CUevent event = peer.opened();
    const CUipcEventHandle before = peer.shared;
    for (int round = 0; round < 10; ++round) {
        OK(peer.tell(Order::record, 0));
        OK(cuEventSynchronize(event));
        CHECK(client.close_gate(kDeadline) && owner.close_gate(kDeadline));
        here.take(client);
        there.take(owner);
        client.park();
        owner.park();
        // Not sealed: what submits nothing may come now, and must not touch what is not there.
        cuEventQuery(event);
        owner.unpark(there.blocks);
        client.unpark(here.blocks);
        client.open_gate();
        owner.open_gate();
        OK(cuEventQuery(event));
        OK(peer.tell(Order::hold, 0));
        OK(peer.tell(Order::record, 0));
        CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
        OK(cuStreamWaitEvent(mine.streams[0], event, 0));
        OK(peer.tell(Order::let_go, 0));
        OK(cuEventSynchronize(event));
        CHECK(mine.done(0));
    }
    CUevent again = nullptr;
    OK(cuIpcOpenEventHandle(&again, before));
    OK(cuEventDestroy_v2(again));
    OK(cuEventDestroy_v2(event));
    OK(peer.tell(Order::destroy));
}

// A stream here waits for a record of the peer's, whose device waits for a call that its gate
// holds.
void gates_close_around_a_wait(Client& client, Peer& peer, Streams& mine) {
    Client owner(peer.pid);
    OK(peer.tell(Order::make));
    CUevent event = peer.opened();
    for (int round = 0; round < 10; ++round) {
        OK(peer.tell(Order::hold, 0));
        OK(peer.tell(Order::record, 0));
        OK(cuStreamWaitEvent(mine.streams[0], event, 0));
        std::thread closing_here([&] { CHECK(client.close_gate(kDeadline)); });
        std::thread closing_there([&] { CHECK(owner.close_gate(kDeadline)); });
        usleep(static_cast<useconds_t>(round) * 1000);
        OK(peer.tell(Order::let_go, 0));  // held, and let through: the device is busy
        closing_there.join();
        closing_here.join();
        CHECK(client.seal_gate() == 0 && owner.seal_gate() == 0);
        client.open_gate();
        owner.open_gate();
        CHECK(mine.done(0));
    }
    OK(cuEventDestroy_v2(event));
    OK(peer.tell(Order::destroy));
}

// PyTorch's way: an event for each tensor, made and destroyed by the owner, opened and never
// closed.
void many_events(Peer& peer, Streams& mine) {
    for (int round = 0; round < 300; ++round) {
        OK(peer.tell(Order::make));
        OK(peer.tell(Order::record, static_cast<unsigned>(round) % 3));
        CUevent event = peer.opened();
        OK(cuStreamWaitEvent(mine.streams[0], event, 0));
        OK(peer.tell(Order::destroy));
    }
    CHECK(mine.done(0));
}

void on_another_device(Streams& mine) {
    int count = 0;
    OK(cuDeviceGetCount(&count));
    CHECK(count > 1);
    CUcontext other = nullptr;
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxPushCurrent_v2(other));
    CUevent event = nullptr;
    CUstream stream = nullptr;
    OK(cuEventCreate(&event, kFlags));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventRecord(event, stream));
    OK(cuStreamWaitEvent(mine.streams[0], event, 0));
    OK(cuEventSynchronize(event));
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
    CUcontext popped = nullptr;
    OK(cuCtxPopCurrent_v2(&popped));
    OK(cuDevicePrimaryCtxRelease_v2(1));
}

void a_peer_that_dies(Peer& peer, Streams& mine) {
    OK(peer.tell(Order::make));
    CUevent event = peer.opened();
    OK(peer.tell(Order::record, 0));
    OK(cuEventSynchronize(event));
    OK(peer.tell(Order::hold, 0));
    OK(peer.tell(Order::record, 0));
    OK(cuStreamWaitEvent(mine.streams[2], event, 0));
    CHECK(mine.held(2));
    peer.end();
    // Its device will never come to that.
    OK(cuEventSynchronize(event));
    CHECK(mine.done(2));
    OK(cuEventRecord(event, mine.streams[0]));
    OK(cuEventSynchronize(event));
    OK(cuStreamWaitEvent(mine.streams[1], event, 0));
    CHECK(mine.done(1));
    OK(cuEventDestroy_v2(event));
}

}  // namespace

int main() {
    Peer peer;  // before this process has a driver
    start_workload();
    Client client(getpid());
    {
        Streams mine;
        alone(mine);
        records_of_a_peer(peer, mine);
        what_the_owner_destroyed(peer, mine);
        handles_that_are_none(peer);
        memory_is_no_event(peer);
        captures(peer, mine);
        parked(client, peer, mine);
        gates_close_around_a_wait(client, peer, mine);
        many_events(peer, mine);
        on_another_device(mine);
        const wire::Hello hello = client.hello();
        CHECK(hello.parkable == 1 && hello.uses_unsupported == 0);
        a_peer_that_dies(peer, mine);
    }
    std::puts("ok");
}
