#include "workload.h"

#include <chrono>
#include <random>

namespace phos::test {

CUcontext context;
CUfunction wait_for;
CUfunction set_value;

namespace {

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

}  // namespace

void start_workload() {
    context = start_cuda();
    CUmodule module = nullptr;
    OK(cuModuleLoadData(&module, kKernels));
    OK(cuModuleGetFunction(&wait_for, module, "wait_for"));
    OK(cuModuleGetFunction(&set_value, module, "set"));
}

void launch(CUfunction function, CUstream stream, CUdeviceptr flag, unsigned value) {
    void* parameters[] = {&flag, &value};
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
}

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
        for (int tries = 0; i % 2 == 0 && client.seal_gate(); ++tries) {
            CHECK(tries < 20000);
            usleep(50);
        }
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

}  // namespace phos::test
