// The hook within the test itself, so that the driver's functions can be made to fail beneath it,
// and its own be called: what happens seldom, and must not harm the program then.
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <new>
#include <string>

#include "base/process.h"
#include "cow/session.h"
#include "fake_mover.h"
#include "gate/gate.h"
#include "memory/blocks.h"
#include "memory/contexts.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

// Replaces one of the driver's functions, as the hook calls it, for a scope.
template <class Function>
class Replaced {
  public:
    Replaced(Function& function, Function other) : function_(function), real_(function) {
        function_ = other;
    }
    ~Replaced() { function_ = real_; }
    Replaced(const Replaced&) = delete;
    Replaced& operator=(const Replaced&) = delete;

  private:
    Function& function_;
    const Function real_;
};

CUresult answer;  // of a driver's function that only says this

void what_cannot_be_asked_counts_as_busy(Client& client) {
    using contexts::Activity;
    CUcontext other = nullptr;
    OK(cuCtxCreate_v2(&other, 0, 0));
    const auto activity = [] { return contexts::activity(1); };
    const auto check = [&](auto& function, auto only_answers) {
        const Replaced replaced(function, +only_answers);
        for (const CUresult error : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN}) {
            answer = error;
            CHECK(activity() == Activity::busy);
            CHECK(!contexts::is_idle(other));
            CHECK(!client.close_gate(50));
        }
        for (const CUresult error : {CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_CONTEXT_IS_DESTROYED}) {
            answer = error;
            CHECK(activity() == Activity::idle);
            CHECK(contexts::is_idle(other));
        }
    };
    check(driver.cuEventCreate, [](CUevent*, unsigned) { return answer; });
    check(driver.cuCtxRecordEvent, [](CUcontext, CUevent) { return answer; });
    check(driver.cuCtxPushCurrent_v2, [](CUcontext) { return answer; });
    while (activity() != Activity::idle) usleep(1000);
    check(driver.cuEventQuery, [](CUevent) { return answer; });
    OK(cuCtxDestroy_v2(other));
    OK(cuCtxSetCurrent(context));
    CHECK(client.close_gate(kDeadline));
    client.open_gate();
}

void a_thread_that_ends_inside_a_call_leaves_the_gate_whole(Client& client) {
    const uint32_t before = gate::view().inside;
    std::thread([] {
        alignas(gate::Pass) static unsigned char never_left[sizeof(gate::Pass)];
        new (never_left) gate::Pass;
        CHECK(gate::own_slot->depth == 1);
    }).join();
    CHECK(gate::view().inside == before);
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 4096));
    CHECK(client.close_gate(kDeadline));
    std::atomic<bool> through{false};
    std::thread next([&] {
        OK(cuCtxSetCurrent(context));
        OK(cuMemsetD32_v2(memory, 1, 16));
        through = true;
    });
    usleep(50000);
    CHECK(!through);
    client.open_gate();
    next.join();
    CHECK(through);
    OK(cuMemFree_v2(memory));
}

void the_hooks_pauses_end_no_thread() {
    static std::atomic<bool> paused{false};
    pthread_t thread{};
    const auto run = [](void*) -> void* {
        pthread_cancel(pthread_self());
        pause_for(1000);
        paused = true;
        return nullptr;
    };
    CHECK(pthread_create(&thread, nullptr, run, nullptr) == 0);
    CHECK(pthread_join(thread, nullptr) == 0);
    CHECK(paused);
}

CUcontext ended;
unsigned pushes_of_ended;
decltype(driver.cuCtxPushCurrent_v2) real_push;

CUresult count_push(CUcontext pushed) {
    pushes_of_ended += pushed == ended;
    return real_push(pushed);
}

// Memory that was freed on a stream of a context that is gone is free, and nobody asks the driver.
void what_was_freed_in_a_context_outlives_it(Client& client) {
    OK(cuCtxCreate_v2(&ended, 0, 0));
    CUstream stream = nullptr;
    CUdeviceptr first = 0;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAllocAsync(&first, 8 << 20, stream));
    OK(cuMemFreeAsync(first, stream));
    OK(cuCtxDestroy_v2(ended));
    OK(cuCtxSetCurrent(context));
    CUdeviceptr second = 0;
    {
        real_push = driver.cuCtxPushCurrent_v2;
        const Replaced replaced(driver.cuCtxPushCurrent_v2, &count_push);
        OK(cuMemAllocAsync(&second, 8 << 20, nullptr));
    }
    CHECK(second == first);
    CHECK(pushes_of_ended == 0);
    OK(cuMemFreeAsync(second, nullptr));
    OK(cuStreamSynchronize(nullptr));
    CHECK(client.close_gate(kDeadline));
    client.open_gate();
}

// Release of a primary context that others still hold ends nothing: what runs there runs on.
void what_was_freed_in_a_context_that_stays_is_waited_for() {
    CUcontext same = nullptr;
    CUstream stream = nullptr;
    CUdeviceptr flag = 0;
    CUdeviceptr first = 0;
    CUdeviceptr second = 0;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&flag, 4));
    OK(cuMemsetD32_v2(flag, 0, 1));
    OK(cuCtxSynchronize());
    OK(cuMemAllocAsync(&first, 16 << 20, stream));
    launch(wait_for, stream, flag, 1);
    OK(cuMemFreeAsync(first, stream));
    OK(cuDevicePrimaryCtxRetain(&same, 0));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    CUstream other = nullptr;
    OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    OK(cuMemAllocAsync(&second, 16 << 20, other));
    CHECK(second != first);
    launch(set_value, other, flag, 1);
    OK(cuCtxSynchronize());
    OK(cuMemFreeAsync(second, other));
    OK(cuCtxSynchronize());
    OK(cuStreamDestroy_v2(stream));
    OK(cuStreamDestroy_v2(other));
    OK(cuMemFree_v2(flag));
}

std::atomic<bool> recording{false};
std::atomic<bool> may_record{false};

CUresult record_late(CUevent event, CUstream stream) {
    recording = true;
    while (!may_record) usleep(1000);
    return DIRECT(cuEventRecord)(event, stream);
}

// The driver blocks in cuMemFreeAsync as long as the queue of the stream is full. A thread
// that would empty it must not need a lock for that.
void a_free_that_blocks_keeps_nobody_from_memory() {
    CUdeviceptr freed = 0;
    OK(cuMemAllocAsync(&freed, 4 << 20, nullptr));
    std::atomic<bool> done{false};
    {
        const Replaced replaced(driver.cuEventRecord, &record_late);
        std::thread freeing([&] {
            OK(cuCtxSetCurrent(context));
            OK(cuMemFreeAsync(freed, nullptr));
        });
        while (!recording) usleep(1000);
        std::thread other([&] {
            CUdeviceptr mine = 0;
            CUdeviceptr base = 0;
            OK(cuCtxSetCurrent(context));
            OK(cuMemAlloc_v2(&mine, 4 << 20));
            CHECK(mine != freed);
            OK(cuMemGetAddressRange_v2(&base, nullptr, mine));
            OK(cuMemFree_v2(mine));
            CHECK(cuMemFree_v2(freed) == CUDA_ERROR_INVALID_VALUE);
            CHECK(cuMemFreeAsync(freed, nullptr) == CUDA_ERROR_INVALID_VALUE);
            done = true;
        });
        for (int i = 0; i < 10000 && !done; ++i) usleep(1000);
        CHECK(done);
        may_record = true;
        other.join();
        freeing.join();
    }
    CUdeviceptr again = 0;
    OK(cuMemAllocAsync(&again, 4 << 20, nullptr));
    CHECK(again == freed);
    OK(cuMemFreeAsync(again, nullptr));
    OK(cuCtxSynchronize());
}

std::string calls;  // that the hook made, in order

// A copy into a slot that no event follows may still run: neither what it reads from nor what it
// writes to is unmapped beneath it.
void copies_that_no_event_follows_are_waited_for(Client& client) {
    static const Driver real = driver;
    const CUdeviceptr memory = filled(2, 3);
    close_gate(client);
    FakeMover mover(client, {8});
    count_of(mover.arm(client));
    client.open_gate();
    mover.start({200'000});  // later than the write: what is saved needs no copy
    {
        const Replaced replaced(
            driver.cuEventRecord, +[](CUevent, CUstream) { return CUDA_ERROR_OUT_OF_MEMORY; });
        OK(cuMemsetD32_v2(memory, 4, 16));
    }
    CHECK(mover.wait_saved());
    mover.stop();
    CHECK(mover.wrong() == 0);
    {
        const Replaced sync(
            driver.cuStreamSynchronize, +[](CUstream stream) {
                calls += "waits ";
                return real.cuStreamSynchronize(stream);
            });
        const Replaced unmap(
            driver.cuMemUnmap, +[](CUdeviceptr at, size_t size) {
                calls += "unmaps ";
                return real.cuMemUnmap(at, size);
            });
        const auto release_slabs = [] {
            const cow::Reader session;
            const std::lock_guard lock(session->shadows[0]->mutex);
            return session->shadows[0]->release_free_slabs();
        };
        CHECK(!release_slabs());
        CHECK(calls.empty());
        OK(cuMemFree_v2(memory));
        CHECK(calls == "waits unmaps ");
        CHECK(release_slabs());
    }
    CHECK(client.ask(wire::Type::forget).status == wire::Status::ok);
}

rlim_t descriptors_before;

CUresult import_the_last(CUmemGenericAllocationHandle* handle, void* shareable,
                         CUmemAllocationHandleType type) {
    const CUresult result = DIRECT(cuMemImportFromShareableHandle)(handle, shareable, type);
    const rlimit none{0, descriptors_before};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    return result;
}

// Imported memory that no descriptor was left for must stay the peer's memory: mode `driver` is all
// there is for the program.
void imported_memory_never_becomes_the_programs_own(Client& client) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle = 0;
    CUmemGenericAllocationHandle imported = 0;
    int descriptor = -1;
    OK(cuMemCreate(&handle, 2 << 20, &properties, 0));
    OK(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    0));
    rlimit limit{};
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    descriptors_before = limit.rlim_max;
    {
        const Replaced replaced(driver.cuMemImportFromShareableHandle, &import_the_last);
        OK(cuMemImportFromShareableHandle(
            &imported, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    const Fitness fit = fitness();
    CHECK(!fit.parkable && !fit.unsupported);
    CHECK(fit.reason.find("ulimit -n") != std::string::npos);
    CHECK(client.close_gate(kDeadline));
    CHECK(client.ask(wire::Type::park).status == wire::Status::unsupported);
    CHECK(count_of(client.ask(wire::Type::rehome)) == 0);
    client.open_gate();
    close(descriptor);
    OK(cuMemRelease(imported));
    OK(cuMemRelease(handle));
}

// In a process of its own, which is not parkable afterwards.
void green_contexts_are_named() {
    const int pid = fork();
    if (pid == 0) {
        start_workload();
        CUgreenCtx green = nullptr;
        answer = CUDA_ERROR_INVALID_VALUE;
        const Replaced replaced(
            driver.cuGreenCtxCreate,
            +[](CUgreenCtx*, CUdevResourceDesc, CUdevice, unsigned) { return answer; });
        CHECK(cuGreenCtxCreate(&green, nullptr, 0, 0) == CUDA_ERROR_INVALID_VALUE);
        CHECK(fitness().parkable);
        answer = CUDA_SUCCESS;
        OK(cuGreenCtxCreate(&green, nullptr, 0, 0));
        const Fitness fit = fitness();
        CHECK(!fit.parkable && !fit.unsupported);
        CHECK(fit.reason.find("cuGreenCtxCreate") != std::string::npos);
        _exit(0);
    }
    int status = 0;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}

}  // namespace

int main() {
    green_contexts_are_named();  // before this process has a driver
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    start_workload();
    Client client(getpid());
    what_cannot_be_asked_counts_as_busy(client);
    std::puts("activity");
    a_thread_that_ends_inside_a_call_leaves_the_gate_whole(client);
    the_hooks_pauses_end_no_thread();
    std::puts("threads");
    what_was_freed_in_a_context_outlives_it(client);
    what_was_freed_in_a_context_that_stays_is_waited_for();
    std::puts("contexts");
    a_free_that_blocks_keeps_nobody_from_memory();
    std::puts("frees");
    copies_that_no_event_follows_are_waited_for(client);
    std::puts("copies");
    imported_memory_never_becomes_the_programs_own(client);
    std::puts("ok");
}
