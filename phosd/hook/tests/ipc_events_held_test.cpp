// Interprocess events while processes are captured, parked, held at their gates, or die.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "event_peer.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

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
    Streams mine;
    captures(peer, mine);
    parked(client, peer, mine);
    gates_close_around_a_wait(client, peer, mine);
    many_events(peer, mine);
    on_another_device(mine);
    const wire::Hello hello = client.hello();
    CHECK(hello.parkable == 1 && hello.uses_unsupported == 0);
    a_peer_that_dies(peer, mine);
    std::puts("ok");
}
