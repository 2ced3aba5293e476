// Memory that came back from a checkpoint and is then shared for the first time: an import, which
// the driver exports to nobody.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <set>

#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

constexpr size_t kSize = 2 << 20;
constexpr size_t kMany = 300;  // more than the hook keeps descriptors for

void park_and_unpark(Client& client) {
    CHECK(client.close_gate(kDeadline));
    const auto held = client.export_all();
    client.park();
    client.unpark(held);
    client.open_gate();
    for (const auto& [id, descriptor] : held) close(descriptor);
}

std::set<uint64_t> ids(Client& client) {
    std::set<uint64_t> all;
    for (const wire::Block& block : client.list()) all.insert(block.id);
    return all;
}

// The program's own memory, mapped, with a number at its beginning and end.
struct Piece {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr at = 0;
    unsigned number;

    explicit Piece(unsigned n) : number(n) {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        OK(cuMemCreate(&handle, kSize, &properties, 0));
        OK(cuMemAddressReserve(&at, kSize, 0, 0, 0));
        OK(cuMemMap(at, kSize, 0, handle, 0));
        OK(cuMemSetAccess(at, kSize, &access, 1));
        OK(cuMemsetD32_v2(at, number, 2));
        OK(cuMemsetD32_v2(at + kSize - 4, number, 1));
    }
    void give_back() {
        OK(cuMemUnmap(at, kSize));
        OK(cuMemAddressFree(at, kSize));
        OK(cuMemRelease(handle));
    }
};

unsigned value_at(CUdeviceptr at) {
    unsigned value = 0;
    OK(cuMemcpyDtoH_v2(&value, at, 4));
    return value;
}

// Exports a piece, imports it as a peer would, and sees that both are the same memory.
void share(const Piece& piece) {
    int descriptor = -1;
    OK(cuMemExportToShareableHandle(&descriptor, piece.handle,
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CUmemGenericAllocationHandle imported = 0;
    OK(cuMemImportFromShareableHandle(&imported,
                                      reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    CUdeviceptr there = 0;
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                 CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cuMemAddressReserve(&there, kSize, 0, 0, 0));
    OK(cuMemMap(there, kSize, 0, imported, 0));
    OK(cuMemSetAccess(there, kSize, &access, 1));
    CHECK(value_at(there + kSize - 4) == piece.number);
    OK(cuMemsetD32_v2(there, piece.number + 1000000, 1));
    CHECK(value_at(piece.at) == piece.number + 1000000);
    OK(cuMemUnmap(there, kSize));
    OK(cuMemAddressFree(there, kSize));
    OK(cuMemRelease(imported));
}

void memory_of_the_program(Client& client) {
    std::vector<Piece> pieces;
    for (unsigned i = 0; i < kMany; ++i) pieces.emplace_back(i);
    park_and_unpark(client);
    const std::set<uint64_t> before = ids(client);
    for (const Piece& piece : pieces) share(piece);
    // Whose memory was replaced is another block to a client, which may still hold the old memory.
    std::set<uint64_t> kept = ids(client);
    CHECK(kept.size() == before.size());
    for (auto at = kept.begin(); at != kept.end();)
        at = before.count(*at) ? std::next(at) : kept.erase(at);
    CHECK(!kept.empty() && kept.size() < kMany);
    // The handles and what they stand for are what they were.
    CUmemGenericAllocationHandle again = 0;
    OK(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(pieces.back().at)));
    CHECK(again == pieces.back().handle);
    OK(cuMemRelease(again));
    park_and_unpark(client);
    for (Piece& piece : pieces) {
        CHECK(value_at(piece.at) == piece.number + 1000000);
        CHECK(value_at(piece.at + 4) == piece.number);
        piece.give_back();
        CHECK(cuMemMap(piece.at, kSize, 0, piece.handle, 0) != CUDA_SUCCESS);
    }
}

// By legacy IPC, while other threads work on the same slab.
void memory_of_cu_mem_alloc_under_load(Client& client) {
    CUdeviceptr mine = 0;
    CUdeviceptr others = 0;
    OK(cuMemAlloc_v2(&mine, 4096));
    OK(cuMemAlloc_v2(&others, 4096));
    OK(cuMemsetD32_v2(mine, 77, 1024));
    CUstream stream = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    Worker worker([others, stream](unsigned step) {
        unsigned value = 0;
        OK(cuMemsetD32Async(others, step, 1024, stream));
        OK(cuMemcpyDtoHAsync_v2(&value, others + 4092, 4, stream));
        OK(cuStreamSynchronize(stream));
        CHECK(value == step);
    });
    for (int round = 0; round < 20; ++round) {
        park_and_unpark(client);
        CUipcMemHandle handle{};
        OK(cuIpcGetMemHandle(&handle, mine));
        CHECK(value_at(mine + 4092) == 77);
        worker.more(2);
        OK(cuMemFree_v2(mine));  // the slab was exported; the next round is with another
        OK(cuMemAlloc_v2(&mine, (3 << 20) + static_cast<size_t>(round)));
        OK(cuMemsetD32_v2(mine, 77, 1024));
    }
}

// A program that does not come to rest is told no, and goes on.
void memory_in_use_for_long(Client& client) {
    CUdeviceptr flag = 0;
    CUdeviceptr memory = 0;
    CUstream one = nullptr;
    CUstream two = nullptr;
    OK(cuMemAlloc_v2(&flag, 4));
    OK(cuMemAlloc_v2(&memory, 5 << 20));
    OK(cuMemsetD32_v2(flag, 0, 1));
    OK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
    park_and_unpark(client);
    launch(wait_for, one, flag, 1);
    CUipcMemHandle handle{};
    CHECK(cuIpcGetMemHandle(&handle, memory) == CUDA_ERROR_NOT_SUPPORTED);
    launch(set_value, two, flag, 1);
    OK(cuStreamSynchronize(one));
    OK(cuIpcGetMemHandle(&handle, memory));
    CHECK(client.close_gate(kDeadline));  // no deadline of the hook's own is left over
    client.open_gate();
}

// A peer that allocates memory, gives its handle away and waits.
struct Peer {
    int pid;
    CUipcMemHandle handle;
};

Peer start_peer() {
    int ends[2];
    Peer peer{};
    CHECK(pipe(ends) == 0);
    peer.pid = fork();
    if (peer.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        start_workload();
        CUdeviceptr memory = 0;
        OK(cuMemAlloc_v2(&memory, kSize));
        OK(cuMemsetD32_v2(memory, 99, kSize / 4));
        OK(cuIpcGetMemHandle(&peer.handle, memory));
        CHECK(write(ends[1], &peer.handle, sizeof peer.handle) == sizeof peer.handle);
        for (;;) pause();
    }
    close(ends[1]);
    CHECK(peer.pid > 0 && read(ends[0], &peer.handle, sizeof peer.handle) == sizeof peer.handle);
    close(ends[0]);
    return peer;
}

// The owner is parked for longer than anybody's patience; meanwhile the one that waits for it is
// brought to rest as well.
void memory_of_a_parked_peer(Client& client, const Peer& peer) {
    Client owner(peer.pid);
    CHECK(owner.close_gate(kDeadline));
    const auto held = owner.export_all();
    owner.park();
    std::atomic<bool> opened{false};
    CUdeviceptr memory = 0;
    std::thread opener([&] {
        OK(cuCtxSetCurrent(context));
        OK(cuIpcOpenMemHandle_v2(&memory, peer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        opened = true;
    });
    sleep(1);
    CHECK(client.close_gate(kDeadline));
    client.open_gate();
    sleep(7);
    CHECK(!opened);
    owner.unpark(held);
    owner.open_gate();
    for (const auto& [id, descriptor] : held) close(descriptor);
    opener.join();
    CHECK(value_at(memory + kSize - 4) == 99);
    OK(cuIpcCloseMemHandle(memory));
}

// Nobody has waited for its end: it is still there as a zombie.
void memory_of_a_dead_peer(const Peer& peer) {
    siginfo_t ended{};
    CHECK(kill(peer.pid, SIGKILL) == 0);
    CHECK(waitid(P_PID, static_cast<id_t>(peer.pid), &ended, WEXITED | WNOWAIT) == 0);
    const time_t begin = time(nullptr);
    CUdeviceptr memory = 0;
    CHECK(cuIpcOpenMemHandle_v2(&memory, peer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
          CUDA_ERROR_INVALID_VALUE);
    CHECK(time(nullptr) - begin < 4);
    CHECK(waitid(P_PID, static_cast<id_t>(peer.pid), &ended, WEXITED) == 0);
}

}  // namespace

int main() {
    const Peer peer = start_peer();  // before this process has a driver
    start_workload();
    Client client(getpid());
    memory_of_the_program(client);
    memory_of_cu_mem_alloc_under_load(client);
    memory_in_use_for_long(client);
    memory_of_a_parked_peer(client, peer);
    memory_of_a_dead_peer(peer);
    CHECK(client.hello().parkable == 1);
    std::puts("ok");
}
