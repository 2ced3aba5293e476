// Interprocess events between two processes under the hook.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "event_peer.h"
#include "intercept/legacy_ipc.h"
#include "memory/event_words.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;
using legacy_ipc::Ticket;

namespace {

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
        const wire::Hello hello = client.hello();
        CHECK(hello.parkable == 1 && hello.uses_unsupported == 0);
    }
    std::puts("ok");
}
