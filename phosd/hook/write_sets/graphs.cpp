#include "write_sets/graphs.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/overrides.h"
#include "gate/gate.h"
#include "memory/shared_events.h"
#include "write_sets/graph_nodes.h"

namespace phos {
namespace {

using graphs::Node;

// What is needed at a launch, computed from the nodes and the board's entries for their kernels.
struct Summary {
    uint64_t generation;  // of the board's entries
    bool everything = false;
    std::vector<uint64_t> addresses;  // sorted, each once
    std::vector<cow::Range> ranges;
    struct Launches {
        kernels::Kernel* kernel;
        uint64_t verdicts[kernels::kVerdicts];
        bool guessed;  // one of them was predicted by its arguments alone
    };
    std::vector<Launches> launches;

    void bytes(uint64_t address, uint64_t count) { ranges.push_back({address, address + count}); }
    void reach(uint64_t address) { addresses.push_back(address); }
};

struct Graph {
    bool launched_by_device = false;
    std::vector<Node> nodes;  // by handle
    std::shared_ptr<const Summary> summary;
};

std::mutex mutex;
std::unordered_map<CUgraphExec, Graph> known;
// A graph that kernels can launch may run within any other.
size_t launchable_by_device = 0;

std::shared_ptr<const Summary> summarise(const std::vector<Node>& nodes) {
    const auto summary = std::make_shared<Summary>();
    summary->generation = kernels::generation();
    std::map<kernels::Kernel*, Summary::Launches> launches;
    for (const Node& node : nodes) {
        summary->everything |= node.everything;
        summary->ranges.insert(summary->ranges.end(), node.ranges.begin(), node.ranges.end());
        for (const graphs::Launch& launch : node.launches) {
            Summary::Launches& counted = launches[launch.kernel];
            counted.kernel = launch.kernel;
            const auto analysed = launch.parameters.empty()
                                      ? write_sets::Analysed()
                                      : write_sets::Analysed(*launch.kernel, launch.shape,
                                                             {nullptr, launch.parameters.data(),
                                                              launch.parameters.size()});
            ++counted.verdicts[analysed.verdict()];
            const uint32_t flags = launch.kernel->flags.load(std::memory_order_relaxed);
            const uint64_t written = flags & board::kWritesOnly
                                         ? launch.kernel->written.load(std::memory_order_relaxed)
                                         : ~0ull;
            if (flags & board::kSuspect) summary->everything = true;
            if (!(flags & board::kWritesOnly) && analysed.tell(*summary)) continue;
            counted.guessed |= !(flags & board::kSuspect);
            for (const graphs::Word& word : launch.words)
                if (!word.mask || (word.mask & written)) summary->addresses.push_back(word.address);
        }
    }
    std::vector<uint64_t>& addresses = summary->addresses;
    std::sort(addresses.begin(), addresses.end());
    addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
    for (const auto& [kernel, counted] : launches) summary->launches.push_back(counted);
    return summary;
}

void forget(CUgraphExec exec) {
    const std::lock_guard lock(mutex);
    const auto found = known.find(exec);
    if (found == known.end()) return;
    launchable_by_device -= found->second.launched_by_device;
    known.erase(found);
}

CUresult note(CUresult result, const CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
    if (result != CUDA_SUCCESS || !exec) return result;
    forget(*exec);
    Graph made;
    made.launched_by_device = flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
    made.nodes = graphs::nodes_of(graph);
    const std::lock_guard lock(mutex);
    launchable_by_device += made.launched_by_device;
    known[*exec] = std::move(made);
    return result;
}

// A failed update may have been applied in part; nothing is known about the graph then.
CUresult note_update(CUresult result, CUgraphExec exec, CUgraph graph) {
    std::vector<Node> nodes;
    if (result == CUDA_SUCCESS)
        nodes = graphs::nodes_of(graph);
    else
        nodes.emplace_back().everything = true;
    const std::lock_guard lock(mutex);
    const auto found = known.find(exec);
    if (found == known.end()) return result;
    found->second.nodes = std::move(nodes);
    found->second.summary = nullptr;
    return result;
}

template <class Parameters>
CUresult note_change(CUresult result, CUgraphExec exec, CUgraphNode handle,
                     const Parameters* parameters) {
    if (result != CUDA_SUCCESS || !parameters) return result;
    Node changed;
    changed.handle = handle;
    changed.add(*parameters);
    const std::lock_guard lock(mutex);
    const auto found = known.find(exec);
    if (found == known.end()) return result;
    std::vector<Node>& nodes = found->second.nodes;
    const auto at =
        std::lower_bound(nodes.begin(), nodes.end(), handle,
                         [](const Node& node, CUgraphNode sought) { return node.handle < sought; });
    if (at != nodes.end() && at->handle == handle) {
        *at = std::move(changed);
    } else {
        // A node of a child graph, or of the graph before an update.
        nodes.clear();
        nodes.emplace_back().everything = true;
    }
    found->second.summary = nullptr;
    return result;
}

// As note_change(), for nodes that write one range.
CUresult note_range(CUresult result, CUgraphExec exec, CUgraphNode handle,
                    const cow::Range& range) {
    return note_change(result, exec, handle, &range);
}

std::shared_ptr<const Summary> find(CUgraphExec exec) {
    const std::lock_guard lock(mutex);
    const auto found = known.find(exec);
    if (found == known.end() || launchable_by_device) return nullptr;
    std::shared_ptr<const Summary>& summary = found->second.summary;
    if (!summary || summary->generation != kernels::generation())
        summary = summarise(found->second.nodes);
    return summary;
}

}  // namespace

void graphs::predict(write_sets::Prediction& prediction, CUgraphExec exec) {
    const std::shared_ptr<const Summary> summary = find(exec);
    if (!summary) return prediction.everything();
    for (const Summary::Launches& one : summary->launches) {
        for (uint32_t verdict = 0; verdict < kernels::kVerdicts; ++verdict)
            if (one.verdicts[verdict])
                kernels::count_launch(one.kernel, static_cast<kernels::Verdict>(verdict),
                                      one.verdicts[verdict]);
        if (one.guessed) one.kernel->guessed.store(true, std::memory_order_relaxed);
    }
    if (summary->everything) return prediction.everything();
    for (const cow::Range& range : summary->ranges)
        prediction.bytes(range.begin, range.end - range.begin);
    for (const uint64_t address : summary->addresses) prediction.reach(address);
}

CUresult overrides::cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, CUgraphNode* failed,
                                       char* text, size_t size) {
    const gate::Pass pass;
    return note(driver.cuGraphInstantiate(exec, graph, failed, text, size), exec, graph, 0);
}
CUresult overrides::cuGraphInstantiate_v2(CUgraphExec* exec, CUgraph graph, CUgraphNode* failed,
                                          char* text, size_t size) {
    const gate::Pass pass;
    return note(driver.cuGraphInstantiate_v2(exec, graph, failed, text, size), exec, graph, 0);
}
CUresult overrides::cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph,
                                                unsigned long long flags) {
    const gate::Pass pass;
    return note(driver.cuGraphInstantiateWithFlags(exec, graph, flags), exec, graph, flags);
}
// With a flag, these two also submit work to a stream.
CUresult overrides::cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph,
                                                 CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
    const gate::Pass pass;
    const CUresult result = driver.cuGraphInstantiateWithParams(exec, graph, parameters);
    return note(result, exec, graph, parameters ? parameters->flags : 0);
}
CUresult overrides::cuGraphInstantiateWithParams_ptsz(CUgraphExec* exec, CUgraph graph,
                                                      CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
    const gate::Pass pass;
    const CUresult result = driver.cuGraphInstantiateWithParams_ptsz(exec, graph, parameters);
    return note(result, exec, graph, parameters ? parameters->flags : 0);
}

CUresult overrides::cuGraphExecDestroy(CUgraphExec exec) {
    forget(exec);  // before the handle can be reused
    return driver.cuGraphExecDestroy(exec);
}

CUresult overrides::cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* failed,
                                      CUgraphExecUpdateResult* outcome) {
    const gate::Pass pass;
    return note_update(driver.cuGraphExecUpdate(exec, graph, failed, outcome), exec, graph);
}
CUresult overrides::cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph,
                                         CUgraphExecUpdateResultInfo* outcome) {
    const gate::Pass pass;
    return note_update(driver.cuGraphExecUpdate_v2(exec, graph, outcome), exec, graph);
}

CUresult overrides::cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                   const CUDA_KERNEL_NODE_PARAMS_v1* parameters) {
    const gate::Pass pass;
    return note_change(driver.cuGraphExecKernelNodeSetParams(exec, node, parameters), exec, node,
                       parameters);
}
CUresult overrides::cuGraphExecKernelNodeSetParams_v2(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2* parameters) {
    const gate::Pass pass;
    return note_change(driver.cuGraphExecKernelNodeSetParams_v2(exec, node, parameters), exec, node,
                       parameters);
}
CUresult overrides::cuGraphExecBatchMemOpNodeSetParams(
    CUgraphExec exec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS* parameters) {
    const gate::Pass pass;
    return note_change(driver.cuGraphExecBatchMemOpNodeSetParams(exec, node, parameters), exec,
                       node, parameters);
}
CUresult overrides::cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                       CUgraph child) {
    const gate::Pass pass;
    return note_change(driver.cuGraphExecChildGraphNodeSetParams(exec, node, child), exec, node,
                       &child);
}
CUresult overrides::cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                   const CUDA_MEMCPY3D_v2* copy,
                                                   CUcontext context) {
    const gate::Pass pass;
    const CUresult result = driver.cuGraphExecMemcpyNodeSetParams(exec, node, copy, context);
    return copy ? note_range(result, exec, node, write_sets::destination_of(*copy)) : result;
}
CUresult overrides::cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                   const CUDA_MEMSET_NODE_PARAMS* fill,
                                                   CUcontext context) {
    const gate::Pass pass;
    const CUresult result = driver.cuGraphExecMemsetNodeSetParams(exec, node, fill, context);
    return fill ? note_range(result, exec, node, write_sets::destination_of(*fill)) : result;
}

CUresult overrides::cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                             CUgraphNodeParams* parameters) {
    const gate::Pass pass;
    if (!shared_events::fit_for_graph(parameters)) return CUDA_ERROR_NOT_SUPPORTED;
    const CUresult result = driver.cuGraphExecNodeSetParams(exec, node, parameters);
    if (result != CUDA_SUCCESS || !parameters) return result;
    switch (parameters->type) {
        case CU_GRAPH_NODE_TYPE_KERNEL:
            return note_change(result, exec, node, &parameters->kernel);
        case CU_GRAPH_NODE_TYPE_MEMCPY:
            return note_range(result, exec, node,
                              write_sets::destination_of(parameters->memcpy.copyParams));
        case CU_GRAPH_NODE_TYPE_MEMSET: {
            const CUDA_MEMSET_NODE_PARAMS_v2& fill = parameters->memset;
            return note_range(
                result, exec, node,
                write_sets::destination_of(CUDA_MEMSET_NODE_PARAMS{
                    fill.dst, fill.pitch, fill.value, fill.elementSize, fill.width, fill.height}));
        }
        case CU_GRAPH_NODE_TYPE_GRAPH:
            return note_change(result, exec, node, &parameters->graph.graph);
        case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
            const CUDA_BATCH_MEM_OP_NODE_PARAMS_v2& operations = parameters->memOp;
            const CUDA_BATCH_MEM_OP_NODE_PARAMS same{operations.ctx, operations.count,
                                                     operations.paramArray, operations.flags};
            return note_change(result, exec, node, &same);
        }
        case CU_GRAPH_NODE_TYPE_CONDITIONAL:
            return note_update(CUDA_ERROR_UNKNOWN, exec, nullptr), result;
        default:  // writes no memory, before or after
            return result;
    }
}

}  // namespace phos
