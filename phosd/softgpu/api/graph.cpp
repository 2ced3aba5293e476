// Graphs: making, shape, instantiating, launching.
#include "core/graph.h"

#include <algorithm>

#include "api/api.h"
#include "core/graph_memory.h"
#include "core/submit.h"

using namespace phos::softgpu;

namespace {

constexpr cuuint64_t kFlags = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                              CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                              CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

GraphPtr graph_of(CUgraph handle) {
    return runtime().graphs.get(handle, CUDA_ERROR_INVALID_VALUE);
}
std::shared_ptr<Node> node_of(CUgraphNode handle) {
    return runtime().nodes.get(handle, CUDA_ERROR_INVALID_VALUE);
}
std::shared_ptr<GraphExec> exec_of(CUgraphExec handle) {
    return runtime().graph_execs.get(handle, CUDA_ERROR_INVALID_VALUE);
}
// For changes that graphs with memory nodes do not allow.
GraphPtr plain_graph_of(CUgraph handle) {
    GraphPtr graph = graph_of(handle);
    require(!has_memory_nodes(*graph), CUDA_ERROR_NOT_SUPPORTED);
    return graph;
}
CUgraphNode handle_of(const Node* node) {
    return reinterpret_cast<CUgraphNode>(const_cast<Node*>(node));
}

void instantiate(CUgraphExec* exec, CUgraph graph, cuuint64_t flags) {
    require(exec != nullptr);
    require((flags & ~kFlags) == 0, CUDA_ERROR_NOT_SUPPORTED);
    const GraphPtr from = graph_of(graph);
    std::lock_guard lock(from->mutex);
    require(!has_memory_nodes(*from) || from->exec.expired(), CUDA_ERROR_NOT_SUPPORTED);
    const auto made = std::make_shared<GraphExec>(from, flags);
    from->exec = made;
    *exec = runtime().graph_execs.add(made);
}

// The driver's way of returning lists: without an array, `count` is how many there are; with one,
// `count` are filled in, with null for those that are not there.
template <typename Fill>
void list(size_t* count, size_t there, bool wanted, Fill fill) {
    require(count != nullptr);
    for (size_t i = 0; wanted && i < *count; ++i) fill(i);
    *count = wanted ? std::min(*count, there) : there;
}

void list_nodes(CUgraphNode* nodes, size_t* count, const std::vector<const Node*>& all) {
    list(count, all.size(), nodes != nullptr,
         [&](size_t i) { nodes[i] = i < all.size() ? handle_of(all[i]) : nullptr; });
}

void clear_edges(CUgraphEdgeData* edges, const size_t* count) {
    if (edges) std::fill_n(edges, *count, CUgraphEdgeData{});
}

}  // namespace

API(cuGraphCreate, (CUgraph * graph, unsigned flags), (graph, flags)) {
    require(graph != nullptr && flags == 0);
    *graph = runtime().graphs.add(std::make_shared<Graph>());
}
API(cuGraphDestroy, (CUgraph graph), (graph)) {
    runtime().graphs.remove(graph, CUDA_ERROR_INVALID_VALUE);
}
API(cuGraphClone, (CUgraph * clone, CUgraph graph), (clone, graph)) {
    require(clone != nullptr);
    *clone = runtime().graphs.add(plain_graph_of(graph)->clone());
}
API(cuGraphNodeFindInClone, (CUgraphNode * node, CUgraphNode original, CUgraph clone),
    (node, original, clone)) {
    require(node != nullptr);
    for (const auto& candidate : graph_of(clone)->nodes())
        if (handle_of(candidate->original) == original) {
            *node = handle_of(candidate.get());
            return;
        }
    fail(CUDA_ERROR_INVALID_VALUE);
}
API(cuGraphDestroyNode, (CUgraphNode handle), (handle)) {
    const auto node = node_of(handle);
    require(!has_memory_nodes(*node->graph), CUDA_ERROR_NOT_SUPPORTED);
    node->graph->remove(*node);
}

API(cuGraphGetNodes, (CUgraph graph, CUgraphNode* nodes, size_t* count), (graph, nodes, count)) {
    std::vector<const Node*> all;
    for (const auto& node : graph_of(graph)->nodes()) all.push_back(node.get());
    list_nodes(nodes, count, all);
}
API(cuGraphGetRootNodes, (CUgraph graph, CUgraphNode* nodes, size_t* count),
    (graph, nodes, count)) {
    std::vector<const Node*> roots;
    for (const auto& node : graph_of(graph)->nodes())
        if (node->dependencies.empty()) roots.push_back(node.get());
    list_nodes(nodes, count, roots);
}
API(cuGraphGetEdges_v2,
    (CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edges, size_t* count),
    (graph, from, to, edges, count)) {
    require((from == nullptr) == (to == nullptr));
    std::vector<std::pair<const Node*, const Node*>> all;
    for (const auto& node : graph_of(graph)->nodes())
        for (const Node* before : node->dependencies) all.emplace_back(before, node.get());
    list(count, all.size(), from != nullptr, [&](size_t i) {
        from[i] = i < all.size() ? handle_of(all[i].first) : nullptr;
        to[i] = i < all.size() ? handle_of(all[i].second) : nullptr;
    });
    clear_edges(from ? edges : nullptr, count);
}
API(cuGraphNodeGetDependencies_v2,
    (CUgraphNode node, CUgraphNode* dependencies, CUgraphEdgeData* edges, size_t* count),
    (node, dependencies, edges, count)) {
    const auto of = node_of(node);
    list_nodes(dependencies, count, {of->dependencies.begin(), of->dependencies.end()});
    clear_edges(dependencies ? edges : nullptr, count);
}
API(cuGraphNodeGetDependentNodes_v2,
    (CUgraphNode node, CUgraphNode* dependents, CUgraphEdgeData* edges, size_t* count),
    (node, dependents, edges, count)) {
    const auto of = node_of(node);
    std::vector<const Node*> all;
    for (const auto& other : of->graph->nodes())
        if (std::count(other->dependencies.begin(), other->dependencies.end(), of.get()))
            all.push_back(other.get());
    list_nodes(dependents, count, all);
    clear_edges(dependents ? edges : nullptr, count);
}
API(cuGraphAddDependencies_v2,
    (CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData* edges,
     size_t count),
    (graph, from, to, edges, count)) {
    const GraphPtr in = graph_of(graph);
    require((from && to) || count == 0);
    for (size_t i = 0; i < count; ++i) {
        require(!edges || edges[i].type == 0, CUDA_ERROR_NOT_SUPPORTED);
        const auto before = node_of(from[i]), after = node_of(to[i]);
        require(before->graph == in.get() && after->graph == in.get() && before != after);
        auto& dependencies = after->dependencies;
        require(std::count(dependencies.begin(), dependencies.end(), before.get()) == 0);
        dependencies.push_back(before.get());
    }
}
API(cuGraphRemoveDependencies_v2,
    (CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData* edges,
     size_t count),
    (graph, from, to, edges, count)) {
    (void)edges;
    plain_graph_of(graph);
    require((from && to) || count == 0);
    for (size_t i = 0; i < count; ++i) {
        auto& dependencies = node_of(to[i])->dependencies;
        const auto edge =
            std::find(dependencies.begin(), dependencies.end(), node_of(from[i]).get());
        require(edge != dependencies.end());
        dependencies.erase(edge);
    }
}

API(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags),
    (exec, graph, flags)) {
    instantiate(exec, graph, flags);
}
API(cuGraphInstantiate_v2,
    (CUgraphExec * exec, CUgraph graph, CUgraphNode* node, char* log, size_t size),
    (exec, graph, node, log, size)) {
    if (node) *node = nullptr;
    if (log && size) *log = 0;
    instantiate(exec, graph, 0);
}

static void instantiate_with(CUgraphExec* exec, CUgraph graph,
                             CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
    require(parameters != nullptr);
    parameters->hErrNode_out = nullptr;
    parameters->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    instantiate(exec, graph, parameters->flags);
    parameters->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
}
// The stream is in the parameters; there is nothing to upload, so the two forms do the same.
DRIVER_API cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph,
                                        CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
    return call([&] { instantiate_with(exec, graph, parameters); });
}
DRIVER_API cuGraphInstantiateWithParams_ptsz(CUgraphExec* exec, CUgraph graph,
                                             CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
    return call([&] { instantiate_with(exec, graph, parameters); });
}

API(cuGraphExecDestroy, (CUgraphExec exec), (exec)) {
    runtime().graph_execs.remove(exec, CUDA_ERROR_INVALID_VALUE);
}
API(cuGraphExecGetFlags, (CUgraphExec exec, cuuint64_t* flags), (exec, flags)) {
    require(flags != nullptr);
    *flags = exec_of(exec)->flags;
}
API(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* result),
    (exec, graph, result)) {
    require(result != nullptr);
    const Node* offender = nullptr;
    result->result = exec_of(exec)->update(*graph_of(graph), offender);
    result->errorNode = handle_of(offender);
    result->errorFromNode = nullptr;
    require(result->result == CU_GRAPH_EXEC_UPDATE_SUCCESS, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
}
STREAM_API(cuGraphUpload, (CUgraphExec exec, CUstream stream), (exec, stream)) {
    exec_of(exec);
    stream_of(stream);
}
STREAM_API(cuGraphLaunch, (CUgraphExec exec, CUstream stream), (exec, stream)) {
    const StreamPtr on = stream_of(stream);
    const auto launched = exec_of(exec);
    require(!captures(on), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    submit(on, launched->launch());
}
API(cuGraphNodeSetEnabled, (CUgraphExec exec, CUgraphNode node, unsigned enabled),
    (exec, node, enabled)) {
    const auto in = exec_of(exec);
    std::lock_guard lock(in->mutex);
    Step& step = in->step_of(*node_of(node));
    require(step.type <= CU_GRAPH_NODE_TYPE_MEMSET);
    step.enabled = enabled != 0;
}
API(cuGraphNodeGetEnabled, (CUgraphExec exec, CUgraphNode node, unsigned* enabled),
    (exec, node, enabled)) {
    require(enabled != nullptr);
    const auto in = exec_of(exec);
    std::lock_guard lock(in->mutex);
    *enabled = in->step_of(*node_of(node)).enabled;
}

API(cuUserObjectCreate,
    (CUuserObject * handle, void* object, CUhostFn destroy, unsigned count, unsigned flags),
    (handle, object, destroy, count, flags)) {
    require(handle && object && destroy && count > 0 && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    *handle = runtime().user_objects.add(std::make_shared<UserObject>(object, destroy, count));
}
API(cuUserObjectRetain, (CUuserObject object, unsigned count), (object, count)) {
    require(count > 0);
    runtime().user_objects.get(object, CUDA_ERROR_INVALID_VALUE)->retain(count);
}
API(cuUserObjectRelease, (CUuserObject object, unsigned count), (object, count)) {
    require(count > 0);
    runtime().user_objects.get(object, CUDA_ERROR_INVALID_VALUE)->release(count);
}
API(cuGraphRetainUserObject, (CUgraph graph, CUuserObject object, unsigned count, unsigned flags),
    (graph, object, count, flags)) {
    require(count > 0 && flags <= CU_GRAPH_USER_OBJECT_MOVE);
    const auto kept = runtime().user_objects.get(object, CUDA_ERROR_INVALID_VALUE);
    if (flags != CU_GRAPH_USER_OBJECT_MOVE) kept->retain(count);
    graph_of(graph)->user_objects[kept] += count;
}
API(cuGraphReleaseUserObject, (CUgraph graph, CUuserObject object, unsigned count),
    (graph, object, count)) {
    const auto kept = runtime().user_objects.get(object, CUDA_ERROR_INVALID_VALUE);
    auto& held = graph_of(graph)->user_objects;
    const auto found = held.find(kept);
    require(count > 0 && found != held.end() && found->second >= count);
    if ((found->second -= count) == 0) held.erase(found);
    kept->release(count);
}
