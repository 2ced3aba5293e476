// The software GPU from C++, with many threads at once: built with sanitizers, this is what they
// see.
#include <cuda.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                                 \
        }                                                                                  \
    } while (false)
#define OK(call)                                                                              \
    do {                                                                                      \
        const CUresult result = (call);                                                       \
        if (result == CUDA_SUCCESS) break;                                                    \
        std::fprintf(stderr, "%s:%d: error %d from %s\n", __FILE__, __LINE__, result, #call); \
        std::_Exit(1);                                                                        \
    } while (false)

CUcontext g_context;

CUmemAllocationProp properties() {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return wanted;
}

// Fills, copies between two streams through an event, and looks at every byte.
void work_in_two_streams(unsigned seed) {
    OK(cuCtxSetCurrent(g_context));
    constexpr size_t count = 4096;
    CUstream first, second;
    CUevent filled;
    OK(cuStreamCreate(&first, seed % 2 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
    OK(cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&filled, CU_EVENT_DISABLE_TIMING));
    std::vector<unsigned> host(count);
    for (unsigned round = 0; round < 100; ++round) {
        const unsigned value = seed * 1000 + round;
        CUdeviceptr from, to;
        OK(cuMemAlloc(&from, count * 4));
        OK(cuMemAllocAsync(&to, count * 4, second));
        OK(cuMemsetD32Async(from, value, count, first));
        OK(cuEventRecord(filled, first));
        OK(cuStreamWaitEvent(second, filled, 0));
        OK(cuMemcpyDtoDAsync(to, from, count * 4, second));
        OK(cuMemcpyDtoHAsync(host.data(), to, count * 4, second));
        for (const unsigned seen : host) CHECK(seen == value);
        OK(cuMemFreeAsync(to, second));
        OK(cuMemFree(from));
    }
    OK(cuEventDestroy(filled));
    OK(cuStreamDestroy(first));
    OK(cuStreamDestroy(second));
}

// Memory by handle, shared through a descriptor, mapped twice.
void share_and_map(unsigned seed) {
    OK(cuCtxSetCurrent(g_context));
    const CUmemAllocationProp wanted = properties();
    constexpr size_t size = 2 << 20;
    const CUmemAccessDesc access{wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (unsigned round = 0; round < 30; ++round) {
        CUmemGenericAllocationHandle made, imported;
        int descriptor = -1;
        OK(cuMemCreate(&made, size, &wanted, 0));
        OK(cuMemExportToShareableHandle(&descriptor, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                        0));
        OK(cuMemImportFromShareableHandle(
            &imported, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        CHECK(close(descriptor) == 0);
        CUdeviceptr range;
        OK(cuMemAddressReserve(&range, 2 * size, 0, 0, 0));
        OK(cuMemMap(range, size, 0, made, 0));
        OK(cuMemMap(range + size, size, 0, imported, 0));
        OK(cuMemSetAccess(range, 2 * size, &access, 1));
        OK(cuMemRelease(made));
        OK(cuMemRelease(imported));
        unsigned seen = 0;
        OK(cuMemcpyHtoD(range, &seed, 4));
        OK(cuMemcpyDtoH(&seen, range + size, 4));
        CHECK(seen == seed);
        OK(cuMemUnmap(range, 2 * size));
        OK(cuMemAddressFree(range, 2 * size));
    }
}

void capture_and_launch(unsigned seed) {
    OK(cuCtxSetCurrent(g_context));
    CUstream stream;
    CUdeviceptr memory;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAllocAsync(&memory, 256, stream));
    for (unsigned round = 0; round < 50; ++round) {
        CUgraph graph;
        CUgraphExec executable;
        OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(cuMemsetD32Async(memory, seed + round, 64, stream));
        OK(cuStreamEndCapture(stream, &graph));
        OK(cuGraphInstantiate(&executable, graph, 0));
        OK(cuGraphDestroy(graph));
        OK(cuGraphLaunch(executable, stream));
        OK(cuGraphExecDestroy(executable));
        unsigned seen = 0;
        OK(cuMemcpyDtoHAsync(&seen, memory, 4, stream));
        CHECK(seen == seed + round);
    }
    OK(cuMemFreeAsync(memory, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuStreamDestroy(stream));
}

// A lock at any instant lets every call and all work finish, and a checkpoint loses nothing.
void checkpoint_again_and_again(const std::atomic<bool>& done) {
    const int pid = getpid();
    CUcheckpointLockArgs limit{};
    limit.timeoutMs = 10'000;
    int rounds = 0;
    while (!done) {
        OK(cuCheckpointProcessLock(pid, &limit));
        CUprocessState state;
        OK(cuCheckpointProcessGetState(pid, &state));
        CHECK(state == CU_PROCESS_STATE_LOCKED);
        OK(cuCheckpointProcessUnlock(pid, nullptr));
        ++rounds;
        usleep(2000);
    }
    CHECK(rounds > 0);
}

void stale_handles_are_errors() {
    OK(cuCtxSetCurrent(g_context));
    CUstream stream;
    CUevent event;
    OK(cuStreamCreate(&stream, 0));
    OK(cuEventCreate(&event, 0));
    OK(cuStreamDestroy(stream));
    OK(cuEventDestroy(event));
    CHECK(cuStreamSynchronize(stream) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(cuEventQuery(event) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(cuMemFree(12345) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuCtxSetCurrent(reinterpret_cast<CUcontext>(8)) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuModuleUnload(reinterpret_cast<CUmodule>(8)) == CUDA_ERROR_INVALID_HANDLE);
}

void contexts_end_with_what_they_own() {
    size_t before = 0, after = 0, total = 0;
    OK(cuCtxSetCurrent(g_context));
    OK(cuMemGetInfo(&before, &total));
    for (int round = 0; round < 10; ++round) {
        CUcontext context;
        CUstream stream;
        CUdeviceptr memory;
        void* pinned;
        OK(cuCtxCreate(&context, nullptr, 0, 0));
        OK(cuStreamCreate(&stream, 0));
        OK(cuMemAlloc(&memory, 8 << 20));
        OK(cuMemAllocHost(&pinned, 1 << 16));
        OK(cuMemsetD8Async(memory, 1, 8 << 20, stream));
        OK(cuMemcpyDtoHAsync(pinned, memory, 1 << 16, stream));
        OK(cuCtxDestroy(context));
    }
    OK(cuCtxSetCurrent(g_context));
    OK(cuMemGetInfo(&after, &total));
    CHECK(before == after);
}

}  // namespace

int main() {
    CHECK(cuMemAlloc(nullptr, 1) == CUDA_ERROR_NOT_INITIALIZED);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&g_context, 0));
    stale_handles_are_errors();
    contexts_end_with_what_they_own();

    std::atomic<bool> done{false};
    std::thread checkpointer(checkpoint_again_and_again, std::cref(done));
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= 3; ++seed) {
        threads.emplace_back(work_in_two_streams, seed);
        threads.emplace_back(share_and_map, seed);
        threads.emplace_back(capture_and_launch, seed);
    }
    for (std::thread& thread : threads) thread.join();
    done = true;
    checkpointer.join();

    const pid_t child = fork();
    if (child == 0) _exit(cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(cuCtxSetCurrent(g_context));
    OK(cuCtxSynchronize());
    std::puts("ok");
    return 0;
}
