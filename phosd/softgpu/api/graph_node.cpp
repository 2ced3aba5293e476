// Graph nodes by kind: adding, asking, changing; in graphs and in instantiated ones.
#include "api/api.h"
#include "api/works.h"
#include "core/graph_memory.h"

using namespace phos::softgpu;

namespace {

GraphPtr graph_of(CUgraph handle) {
    return runtime().graphs.get(handle, CUDA_ERROR_INVALID_VALUE);
}

std::shared_ptr<Node> node_of(CUgraphNode handle, CUgraphNodeType type) {
    auto node = runtime().nodes.get(handle, CUDA_ERROR_INVALID_VALUE);
    require(node->type == type);
    return node;
}

EventPtr event_of(CUevent handle) {
    return runtime().events.get(handle);
}

void add(CUgraphNode* handle, CUgraph graph, const CUgraphNode* dependencies, size_t count,
         Node node) {
    require(handle != nullptr && (dependencies != nullptr || count == 0));
    const GraphPtr to = graph_of(graph);
    for (size_t i = 0; i < count; ++i) {
        Node* from = runtime().nodes.get(dependencies[i], CUDA_ERROR_INVALID_VALUE).get();
        require(from->graph == to.get());
        node.dependencies.push_back(from);
    }
    *handle = reinterpret_cast<CUgraphNode>(&to->add(std::move(node)));
}

Node node_with(CUgraphNodeType type, WorkPtr work = nullptr) {
    Node node;
    node.type = type;
    node.work = std::move(work);
    return node;
}

Node event_node(CUgraphNodeType type, CUevent event) {
    Node node = node_with(type);
    node.event = event_of(event);
    return node;
}

Node child_node(CUgraph child) {
    Node node = node_with(CU_GRAPH_NODE_TYPE_GRAPH);
    const GraphPtr from = graph_of(child);
    require(!has_memory_nodes(*from), CUDA_ERROR_NOT_SUPPORTED);
    node.child = from->clone();
    runtime().graphs.add(node.child);  // the program may ask for it
    return node;
}

// Sets the address that the node will give.
Node allocation_node(CUDA_MEM_ALLOC_NODE_PARAMS& what) {
    const CUmemPoolProps& properties = what.poolProps;
    const PoolKind kind = PoolKind::of(properties.location, properties.allocType);
    require(kind.device() >= 0 && properties.handleTypes == CU_MEM_HANDLE_TYPE_NONE,
            CUDA_ERROR_NOT_SUPPORTED);
    require(what.accessDescs != nullptr || what.accessDescCount == 0);
    uint8_t access = 0;
    for (size_t i = 0; i < what.accessDescCount; ++i) {
        const CUmemAccessDesc& peer = what.accessDescs[i];
        require(peer.location.type == CU_MEM_LOCATION_TYPE_DEVICE);
        if (peer.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            access |= static_cast<uint8_t>(1u << runtime().device(peer.location.id).ordinal);
    }
    const auto memory = GraphMemory::create(kind.device(), what.bytesize, access);
    what.dptr = memory->address;
    return node_with(CU_GRAPH_NODE_TYPE_MEM_ALLOC, std::make_shared<GraphAllocate>(memory));
}

Node free_node(CUdeviceptr address) {
    const auto memory = GraphMemory::find(address);
    require(memory != nullptr);
    memory->claim_free_node();
    return node_with(CU_GRAPH_NODE_TYPE_MEM_FREE, std::make_shared<GraphFree>(memory));
}

CUDA_KERNEL_NODE_PARAMS_v2 as_v2(const CUDA_KERNEL_NODE_PARAMS_v3& what) {
    return {what.func,         what.gridDimX,  what.gridDimY,  what.gridDimZ,
            what.blockDimX,    what.blockDimY, what.blockDimZ, what.sharedMemBytes,
            what.kernelParams, what.extra,     what.kern,      what.ctx};
}

// The node that a general description means.
Node described(const CUgraphNodeParams& what) {
    switch (what.type) {
        case CU_GRAPH_NODE_TYPE_KERNEL:
            return node_with(what.type, launch_of(as_v2(what.kernel)));
        case CU_GRAPH_NODE_TYPE_MEMCPY:
            return node_with(what.type, copy_of(what.memcpy.copyParams));
        case CU_GRAPH_NODE_TYPE_MEMSET: {
            const auto& set = what.memset;
            return node_with(what.type, fill_of({set.dst, set.pitch, set.value, set.elementSize,
                                                 set.width, set.height}));
        }
        case CU_GRAPH_NODE_TYPE_HOST:
            require(what.host.fn != nullptr);
            return node_with(what.type,
                             std::make_shared<HostCall>(what.host.fn, what.host.userData));
        case CU_GRAPH_NODE_TYPE_GRAPH:
            return child_node(what.graph.graph);
        case CU_GRAPH_NODE_TYPE_EMPTY:
            return node_with(what.type);
        case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
            return event_node(what.type, what.eventWait.event);
        case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
            return event_node(what.type, what.eventRecord.event);
        case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
            return node_with(what.type, value_operations(what.memOp.paramArray, what.memOp.count,
                                                         what.memOp.flags));
        default:
            fail(CUDA_ERROR_NOT_SUPPORTED);
    }
}

WorkPtr batch_of(const CUDA_BATCH_MEM_OP_NODE_PARAMS* what) {
    require(what != nullptr);
    if (what->ctx) runtime().contexts.get(what->ctx, CUDA_ERROR_INVALID_CONTEXT);
    return value_operations(what->paramArray, what->count, what->flags);
}

void change(CUgraphExec exec, CUgraphNode handle, CUgraphNodeType type, WorkPtr work) {
    const auto in = runtime().graph_execs.get(exec, CUDA_ERROR_INVALID_VALUE);
    std::lock_guard lock(in->mutex);
    in->step_of(*node_of(handle, type)).work = std::move(work);
}

template <typename T>
const T& work_of(CUgraphNode handle, CUgraphNodeType type) {
    return static_cast<const T&>(*node_of(handle, type)->work);
}

}  // namespace

API(cuGraphAddNode_v2,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies,
     const CUgraphEdgeData* edges, size_t count, CUgraphNodeParams* what),
    (node, graph, dependencies, edges, count, what)) {
    require(what != nullptr);
    for (size_t i = 0; edges && i < count; ++i)
        require(edges[i].type == 0 && edges[i].from_port == 0, CUDA_ERROR_NOT_SUPPORTED);
    CUDA_MEM_ALLOC_NODE_PARAMS allocation;
    std::memcpy(&allocation, &what->alloc, sizeof allocation);  // two names for one structure
    Node made = what->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC  ? allocation_node(allocation)
                : what->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? free_node(what->free.dptr)
                                                            : described(*what);
    const GraphPtr child = made.child;
    add(node, graph, dependencies, count, std::move(made));
    if (what->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) what->alloc.dptr = allocation.dptr;
    if (child) what->graph.graph = reinterpret_cast<CUgraph>(child.get());
}
API(cuGraphNodeSetParams, (CUgraphNode handle, CUgraphNodeParams* what), (handle, what)) {
    require(what != nullptr);
    const auto node = node_of(handle, what->type);
    Node made = described(*what);
    node->work = made.work;
    node->event = made.event;
    node->child = made.child;
}
API(cuGraphExecNodeSetParams, (CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* what),
    (exec, node, what)) {
    require(what != nullptr);
    require(what->type != CU_GRAPH_NODE_TYPE_GRAPH, CUDA_ERROR_NOT_SUPPORTED);
    Node made = described(*what);
    const auto in = runtime().graph_execs.get(exec, CUDA_ERROR_INVALID_VALUE);
    std::lock_guard lock(in->mutex);
    Step& step = in->step_of(*node_of(node, what->type));
    step.work = made.work;
    step.event = made.event;
}
API(cuGraphNodeGetType, (CUgraphNode node, CUgraphNodeType* type), (node, type)) {
    require(type != nullptr);
    *type = runtime().nodes.get(node, CUDA_ERROR_INVALID_VALUE)->type;
}

API(cuGraphAddKernelNode_v2,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     const CUDA_KERNEL_NODE_PARAMS* what),
    (node, graph, dependencies, count, what)) {
    require(what != nullptr);
    add(node, graph, dependencies, count, node_with(CU_GRAPH_NODE_TYPE_KERNEL, launch_of(*what)));
}
API(cuGraphKernelNodeGetParams_v2, (CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* what),
    (node, what)) {
    require(what != nullptr);
    const auto& launch = work_of<KernelLaunch>(node, CU_GRAPH_NODE_TYPE_KERNEL);
    *what = {};
    what->func = reinterpret_cast<CUfunction>(launch.function.get());
    what->gridDimX = launch.shape.grid.x;
    what->gridDimY = launch.shape.grid.y;
    what->gridDimZ = launch.shape.grid.z;
    what->blockDimX = launch.shape.block.x;
    what->blockDimY = launch.shape.block.y;
    what->blockDimZ = launch.shape.block.z;
    what->sharedMemBytes = launch.shape.dynamic_shared;
    what->kernelParams = launch.arguments();
}
API(cuGraphKernelNodeSetParams_v2, (CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* what),
    (node, what)) {
    require(what != nullptr);
    node_of(node, CU_GRAPH_NODE_TYPE_KERNEL)->work = launch_of(*what);
}
API(cuGraphExecKernelNodeSetParams_v2,
    (CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* what), (exec, node, what)) {
    require(what != nullptr);
    change(exec, node, CU_GRAPH_NODE_TYPE_KERNEL, launch_of(*what));
}

API(cuGraphAddMemcpyNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     const CUDA_MEMCPY3D* what, CUcontext context),
    (node, graph, dependencies, count, what, context)) {
    require(what != nullptr);
    runtime().contexts.get(context, CUDA_ERROR_INVALID_CONTEXT);
    add(node, graph, dependencies, count, node_with(CU_GRAPH_NODE_TYPE_MEMCPY, copy_of(*what)));
}
API(cuGraphMemcpyNodeGetParams, (CUgraphNode node, CUDA_MEMCPY3D* what), (node, what)) {
    require(what != nullptr);
    const auto& copy = work_of<Copy>(node, CU_GRAPH_NODE_TYPE_MEMCPY);
    *what = {};
    const auto type = [](const End& end) {
        return Space::inside(end.address) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    };
    what->srcMemoryType = type(copy.from());
    what->srcHost = reinterpret_cast<const void*>(copy.from().address);
    what->srcDevice = copy.from().address;
    what->srcPitch = copy.from().pitch;
    what->srcHeight = copy.from().height;
    what->dstMemoryType = type(copy.to());
    what->dstHost = reinterpret_cast<void*>(copy.to().address);
    what->dstDevice = copy.to().address;
    what->dstPitch = copy.to().pitch;
    what->dstHeight = copy.to().height;
    what->WidthInBytes = copy.width();
    what->Height = copy.rows();
    what->Depth = copy.slices();
}
API(cuGraphMemcpyNodeSetParams, (CUgraphNode node, const CUDA_MEMCPY3D* what), (node, what)) {
    require(what != nullptr);
    node_of(node, CU_GRAPH_NODE_TYPE_MEMCPY)->work = copy_of(*what);
}
API(cuGraphExecMemcpyNodeSetParams,
    (CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* what, CUcontext context),
    (exec, node, what, context)) {
    require(what != nullptr);
    runtime().contexts.get(context, CUDA_ERROR_INVALID_CONTEXT);
    change(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY, copy_of(*what));
}

API(cuGraphAddMemsetNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     const CUDA_MEMSET_NODE_PARAMS* what, CUcontext context),
    (node, graph, dependencies, count, what, context)) {
    require(what != nullptr);
    runtime().contexts.get(context, CUDA_ERROR_INVALID_CONTEXT);
    add(node, graph, dependencies, count, node_with(CU_GRAPH_NODE_TYPE_MEMSET, fill_of(*what)));
}
API(cuGraphMemsetNodeGetParams, (CUgraphNode node, CUDA_MEMSET_NODE_PARAMS* what), (node, what)) {
    require(what != nullptr);
    *what = work_of<Fill>(node, CU_GRAPH_NODE_TYPE_MEMSET).description();
}
API(cuGraphMemsetNodeSetParams, (CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* what),
    (node, what)) {
    require(what != nullptr);
    node_of(node, CU_GRAPH_NODE_TYPE_MEMSET)->work = fill_of(*what);
}
API(cuGraphExecMemsetNodeSetParams,
    (CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* what, CUcontext context),
    (exec, node, what, context)) {
    require(what != nullptr);
    runtime().contexts.get(context, CUDA_ERROR_INVALID_CONTEXT);
    change(exec, node, CU_GRAPH_NODE_TYPE_MEMSET, fill_of(*what));
}

API(cuGraphAddHostNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     const CUDA_HOST_NODE_PARAMS* what),
    (node, graph, dependencies, count, what)) {
    require(what != nullptr && what->fn != nullptr);
    add(node, graph, dependencies, count,
        node_with(CU_GRAPH_NODE_TYPE_HOST, std::make_shared<HostCall>(what->fn, what->userData)));
}
API(cuGraphHostNodeGetParams, (CUgraphNode node, CUDA_HOST_NODE_PARAMS* what), (node, what)) {
    require(what != nullptr);
    *what = work_of<HostCall>(node, CU_GRAPH_NODE_TYPE_HOST).description();
}
API(cuGraphHostNodeSetParams, (CUgraphNode node, const CUDA_HOST_NODE_PARAMS* what), (node, what)) {
    require(what != nullptr && what->fn != nullptr);
    node_of(node, CU_GRAPH_NODE_TYPE_HOST)->work =
        std::make_shared<HostCall>(what->fn, what->userData);
}
API(cuGraphExecHostNodeSetParams,
    (CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* what), (exec, node, what)) {
    require(what != nullptr && what->fn != nullptr);
    change(exec, node, CU_GRAPH_NODE_TYPE_HOST,
           std::make_shared<HostCall>(what->fn, what->userData));
}

API(cuGraphAddBatchMemOpNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     const CUDA_BATCH_MEM_OP_NODE_PARAMS* what),
    (node, graph, dependencies, count, what)) {
    add(node, graph, dependencies, count,
        node_with(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, batch_of(what)));
}
API(cuGraphBatchMemOpNodeGetParams, (CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS* what),
    (node, what)) {
    require(what != nullptr);
    const auto& operations =
        work_of<ValueOperations>(node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP).operations();
    *what = {};  // the context is not kept: none is needed
    what->count = static_cast<unsigned>(operations.size());
    what->paramArray = const_cast<CUstreamBatchMemOpParams*>(operations.data());
}
API(cuGraphBatchMemOpNodeSetParams, (CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS* what),
    (node, what)) {
    node_of(node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)->work = batch_of(what);
}
API(cuGraphExecBatchMemOpNodeSetParams,
    (CUgraphExec exec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS* what),
    (exec, node, what)) {
    change(exec, node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, batch_of(what));
}

API(cuGraphAddMemAllocNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     CUDA_MEM_ALLOC_NODE_PARAMS* what),
    (node, graph, dependencies, count, what)) {
    require(what != nullptr);
    add(node, graph, dependencies, count, allocation_node(*what));
}
API(cuGraphMemAllocNodeGetParams, (CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS* what),
    (node, what)) {
    require(what != nullptr);
    const auto& memory = *work_of<GraphAllocate>(node, CU_GRAPH_NODE_TYPE_MEM_ALLOC).memory;
    *what = {};
    what->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    what->poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, memory.device};
    what->bytesize = memory.size;
    what->dptr = memory.address;
}
API(cuGraphAddMemFreeNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     CUdeviceptr address),
    (node, graph, dependencies, count, address)) {
    add(node, graph, dependencies, count, free_node(address));
}
API(cuGraphMemFreeNodeGetParams, (CUgraphNode node, CUdeviceptr* address), (node, address)) {
    require(address != nullptr);
    *address = work_of<GraphFree>(node, CU_GRAPH_NODE_TYPE_MEM_FREE).memory->address;
}

API(cuGraphAddEmptyNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count),
    (node, graph, dependencies, count)) {
    add(node, graph, dependencies, count, node_with(CU_GRAPH_NODE_TYPE_EMPTY));
}
API(cuGraphAddChildGraphNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     CUgraph child),
    (node, graph, dependencies, count, child)) {
    add(node, graph, dependencies, count, child_node(child));
}
API(cuGraphChildGraphNodeGetGraph, (CUgraphNode node, CUgraph* graph), (node, graph)) {
    require(graph != nullptr);
    *graph = reinterpret_cast<CUgraph>(node_of(node, CU_GRAPH_NODE_TYPE_GRAPH)->child.get());
}
API(cuGraphAddEventRecordNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     CUevent event),
    (node, graph, dependencies, count, event)) {
    add(node, graph, dependencies, count, event_node(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event));
}
API(cuGraphAddEventWaitNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
     CUevent event),
    (node, graph, dependencies, count, event)) {
    add(node, graph, dependencies, count, event_node(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event));
}
API(cuGraphEventRecordNodeGetEvent, (CUgraphNode node, CUevent* event), (node, event)) {
    require(event != nullptr);
    *event = reinterpret_cast<CUevent>(node_of(node, CU_GRAPH_NODE_TYPE_EVENT_RECORD)->event.get());
}
API(cuGraphEventWaitNodeGetEvent, (CUgraphNode node, CUevent* event), (node, event)) {
    require(event != nullptr);
    *event = reinterpret_cast<CUevent>(node_of(node, CU_GRAPH_NODE_TYPE_WAIT_EVENT)->event.get());
}
