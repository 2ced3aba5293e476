// What the hook adds to a call, while nothing is armed and while a board is: the exported name,
// which the hook answers, and the driver's own function take turns, so that both see the same
// machine. Prints a JSON line a case; needs a runtime folder (in_runtime_dir.sh).
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "fake_mover.h"

using namespace phos;
using namespace phos::test;

namespace {

constexpr size_t kBlocks = 1200;
constexpr size_t kParameters = 12;

const char* const kKernel = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry twelve(
    .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u64 e, .param .u64 f,
    .param .u64 g, .param .u64 h, .param .u64 i, .param .u64 j, .param .u64 k, .param .u64 l)
{
    ret;
}
)";

template <class Body>
double nanoseconds(int calls, Body body) {
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) body(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    return took.count() / calls;
}

// The best and the median of many rounds: whatever else runs on the machine only adds.
template <class Hooked, class Direct>
void compare(const char* what, int rounds, int calls, Hooked hooked, Direct direct) {
    std::vector<double> with;
    std::vector<double> without;
    for (int round = 0; round < rounds; ++round) {
        with.push_back(nanoseconds(calls, hooked));
        without.push_back(nanoseconds(calls, direct));
    }
    std::sort(with.begin(), with.end());
    std::sort(without.begin(), without.end());
    const size_t middle = with.size() / 2;
    std::printf(
        "{\"case\": \"%s\", \"hooked_ns\": %.2f, \"direct_ns\": %.2f, \"hook_ns\": %.2f, "
        "\"hook_median_ns\": %.2f}\n",
        what, with[0], without[0], with[0] - without[0], with[middle] - without[middle]);
    std::fflush(stdout);
}

// To wait for an event that was never recorded is a call that ends at once.
void gated_call(CUstream stream) {
    CUevent event = nullptr;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const auto direct = DIRECT(cuStreamWaitEvent);
    compare(
        "gated call", 1000, 2000, [&](int) { OK(cuStreamWaitEvent(stream, event, 0)); },
        [&](int) { OK(direct(stream, event, 0)); });
}

// Asking an idle stream, as threads do that never rest.
void poll(CUstream stream) {
    const auto direct = DIRECT(cuStreamQuery);
    compare(
        "poll", 1000, 2000, [&](int) { OK(cuStreamQuery(stream)); },
        [&](int) { OK(direct(stream)); });
}

// A launch of no blocks, which the driver refuses at once and the hook looks at like any other;
// each time with other addresses.
void launch(const char* what, CUfunction function, CUstream stream,
            const std::vector<CUdeviceptr>& addresses) {
    const auto direct = DIRECT(cuLaunchKernel);
    std::vector<std::vector<void*>> parameters(kBlocks);
    for (size_t i = 0; i < kBlocks; ++i)
        for (size_t n = 0; n < kParameters; ++n)
            parameters[i].push_back(
                const_cast<CUdeviceptr*>(&addresses[(i * 7 + n * 101) % kBlocks]));
    const auto call = [&](auto kernel, int i) {
        CHECK(kernel(function, 0, 1, 1, 1, 1, 1, 0, stream,
                     parameters[static_cast<size_t>(i) % kBlocks].data(),
                     nullptr) == CUDA_ERROR_INVALID_VALUE);
    };
    compare(
        what, 200, 2 * kBlocks, [&](int i) { call(cuLaunchKernel, i); },
        [&](int i) { call(direct, i); });
}

// Executable graphs of a thousand kernels, made and destroyed.
void graph(CUfunction function, const std::vector<CUdeviceptr>& addresses) {
    std::vector<void*> parameters;
    for (size_t n = 0; n < kParameters; ++n)
        parameters.push_back(const_cast<CUdeviceptr*>(&addresses[n]));
    CUDA_KERNEL_NODE_PARAMS_v2 node{};
    node.func = function;
    node.gridDimX = node.gridDimY = node.gridDimZ = 1;
    node.blockDimX = node.blockDimY = node.blockDimZ = 1;
    node.kernelParams = parameters.data();
    CUgraph graph = nullptr;
    OK(cuGraphCreate(&graph, 0));
    for (int i = 0; i < 1000; ++i) {
        CUgraphNode made = nullptr;
        OK(cuGraphAddKernelNode_v2(&made, graph, nullptr, 0, &node));
    }
    const auto cycle = [&](auto instantiate, auto destroy) {
        CUgraphExec executable = nullptr;
        OK(instantiate(&executable, graph, 0));
        OK(destroy(executable));
    };
    const auto direct = DIRECT(cuGraphInstantiateWithFlags);
    const auto destroy = DIRECT(cuGraphExecDestroy);
    compare(
        "graph of 1000 kernels", 50, 1,
        [&](int) { cycle(cuGraphInstantiateWithFlags, cuGraphExecDestroy); },
        [&](int) { cycle(direct, destroy); });
}

// A board on which all is saved but the newest block, so that the hook stays armed.
std::unique_ptr<board::View> arm(Client& client) {
    std::vector<board::BlockRow> rows;
    uint32_t chunks = 0;
    for (const wire::Block& block : client.list()) {
        const auto count = static_cast<uint32_t>((block.size + board::kChunk - 1) / board::kChunk);
        rows.push_back({block.id, chunks, count});
        chunks += count;
    }
    int descriptor = -1;
    std::unique_ptr<board::View> view(
        board::View::create(rows, nullptr, 0, nullptr, 0, &descriptor));
    CHECK(view);
    for (uint32_t chunk = 0; chunk < rows.back().first_chunk; ++chunk)
        view->word(chunk) = board::saved;
    const wire::Arm request{0, 0};
    CHECK(client.close_gate(4000));
    CHECK(client.ask(wire::Type::arm, &request, sizeof request, {descriptor}).status ==
          wire::Status::ok);
    client.open_gate();
    close(descriptor);
    return view;
}

}  // namespace

int main() {
    setenv("PHOS_SOFTGPU_MEMORY", "8G", 1);  // of which nothing is touched
    setenv("PHOS_SOFTGPU_DIR", std::getenv("PHOS_RUNTIME_DIR"), 1);
    start_cuda();
    CUstream stream = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUmodule module = nullptr;
    CUfunction twelve = nullptr;
    OK(cuModuleLoadData(&module, kKernel));
    OK(cuModuleGetFunction(&twelve, module, "twelve"));
    std::vector<CUdeviceptr> addresses(kBlocks);
    for (CUdeviceptr& address : addresses) OK(cuMemAlloc_v2(&address, 4 << 20));
    CUdeviceptr untouched = 0;
    OK(cuMemAlloc_v2(&untouched, 4 << 20));

    gated_call(stream);
    poll(stream);
    launch("launch, nothing armed", twelve, stream, addresses);
    graph(twelve, addresses);
    Client client(getpid());
    const auto view = arm(client);
    launch("launch, armed", twelve, stream, addresses);
    const board::Header& header = view->header();
    std::printf("{\"case\": \"launch, armed, as the board counts\", \"mean_ns\": %.2f}\n",
                static_cast<double>(header.looked_ns) / static_cast<double>(header.submissions));
}
