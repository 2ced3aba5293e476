// What the program changes while chunks are being saved: captures, contexts that end, mappings.
#include <cstdio>

#include "fake_mover.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

constexpr size_t kChunk = board::kChunk;

// Work that goes into a capture runs later: nothing is shadowed for it, and shadowing for others
// does not end it.
void captures_are_left_alone(Client& client) {
    const CUdeviceptr memory = filled(2, 3);
    CUstream stream = nullptr;
    CUstream captured = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING));
    close_gate(client);
    FakeMover mover(client, {8});
    count_of(mover.arm(client));
    client.open_gate();
    const auto& header = mover.board().header();
    OK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuMemsetD32Async(memory, 4, 16, captured));
    CHECK(header.touches == 0);
    OK(cuMemsetD32Async(memory + kChunk, 5, 16, stream));
    CHECK(header.touches == 1);
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    OK(cuStreamEndCapture(captured, &graph));
    OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    OK(cuGraphLaunch(executable, captured));
    CHECK(header.touches == 2);
    OK(cuStreamSynchronize(captured));
    mover.start({});
    CHECK(mover.wait_saved());
    mover.stop();
    CHECK(mover.wrong() == 0 && mover.saved_from_slots() == 2);
    CHECK(value_at(memory) == 4);
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    OK(cuGraphExecDestroy(executable));
    OK(cuGraphDestroy(graph));
    OK(cuMemFree_v2(memory));
}

// The hook's stream ends with a context; another one is made.
void contexts_end_while_armed(Client& client) {
    const CUdeviceptr memory = filled(2, 3);
    CUcontext other = nullptr;
    CUdeviceptr its_own = 0;
    OK(cuCtxCreate_v2(&other, 0, 0));
    OK(cuMemAlloc_v2(&its_own, kChunk));
    OK(cuMemsetD32_v2(its_own, 6, kChunk / 4));
    OK(cuCtxSynchronize());
    close_gate(client);
    FakeMover mover(client, {8});
    count_of(mover.arm(client));
    client.open_gate();
    OK(cuMemsetD32_v2(memory, 4, 16));
    OK(cuMemsetD32_v2(its_own, 4, 16));
    OK(cuCtxDestroy_v2(other));
    OK(cuMemsetD32_v2(memory + kChunk, 4, 16));
    mover.start({});
    CHECK(mover.wait_saved());
    mover.stop();
    CHECK(mover.wrong() == 0 && mover.saved_from_slots() == 3);
    CHECK(mover.board().header().freed_posted == 1);
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    OK(cuMemFree_v2(memory));
}

// A block at two addresses, mapped anew, closed to its device, and gone, while it is on the board.
void mappings_change_while_armed(Client& client) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const CUmemAccessDesc none{properties.location, CU_MEM_ACCESS_FLAGS_PROT_NONE};
    constexpr size_t kSize = 4 * kChunk;
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr places = 0;
    OK(cuMemCreate(&handle, kSize, &properties, 0));
    OK(cuMemAddressReserve(&places, 3 * kSize, 0, 0, 0));
    for (const size_t at : {size_t{0}, kSize}) {
        OK(cuMemMap(places + at, kSize, 0, handle, 0));
        OK(cuMemSetAccess(places + at, kSize, &access, 1));
    }
    OK(cuMemsetD32_v2(places, 3, kSize / 4));
    OK(cuCtxSynchronize());
    close_gate(client);
    FakeMover mover(client, {8});
    count_of(mover.arm(client));
    client.open_gate();
    OK(cuMemsetD32_v2(places + kSize, 4, 16));
    OK(cuMemUnmap(places, kSize));  // which may be where the shadow is being copied from
    OK(cuMemsetD32_v2(places + kSize + kChunk, 4, 16));
    OK(cuMemMap(places + 2 * kSize, kSize, 0, handle, 0));
    OK(cuMemSetAccess(places + 2 * kSize, kSize, &access, 1));
    OK(cuCtxSynchronize());
    OK(cuMemSetAccess(places + kSize, kSize, &none, 1));
    OK(cuMemsetD32_v2(places + 2 * kSize + 2 * kChunk, 4, 16));
    OK(cuCtxSynchronize());
    OK(cuMemUnmap(places + kSize, 2 * kSize));
    CHECK(mover.board().header().freed_posted == 0);
    OK(cuMemRelease(handle));
    CHECK(mover.board().header().freed_posted == 1);
    mover.start({});
    CHECK(mover.wait_saved());
    mover.stop();
    CHECK(mover.wrong() == 0 && mover.saved_from_slots() == 3);
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
    OK(cuMemAddressFree(places, 3 * kSize));
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    start_workload();
    Client client(getpid());
    captures_are_left_alone(client);
    contexts_end_while_armed(client);
    mappings_change_while_armed(client);
    std::puts("ok");
}
