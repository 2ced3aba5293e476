#include "write_sets/graph_nodes.h"

#include <algorithm>
#include <cstring>

namespace phos::graphs {
namespace {

// Returns a copy of the parameters as a kernel gets them, for tables that come later.
std::vector<unsigned char> copy_of(const kernels::Kernel& kernel, void** parameters, void** extra) {
    ranges::Arguments arguments;
    if (!write_sets::find_arguments(parameters, extra, &arguments)) return {};
    if (arguments.buffer) return {arguments.buffer, arguments.buffer + arguments.size};
    if (!arguments.parameters || !kernel.laid_out || kernel.parameters.empty()) return {};
    const auto& [offset, size] = kernel.parameters.back();
    std::vector<unsigned char> copy(offset + size);
    for (size_t i = 0; i < kernel.parameters.size(); ++i) {
        if (!parameters[i]) return {};
        std::memcpy(copy.data() + kernel.parameters[i].offset, parameters[i],
                    kernel.parameters[i].size);
    }
    return copy;
}

void add_kernel(Node* node, CUfunction function, const write_sets::Shape& shape, void** parameters,
                void** extra) {
    if (!function) {
        node->everything = true;
        return;
    }
    Launch launch{kernels::find(function), {}, shape, {}};
    launch.parameters = copy_of(*launch.kernel, parameters, extra);
    const auto keep = [&](uint64_t address, uint64_t mask) {
        launch.words.push_back({address, mask});
    };
    if (!write_sets::each_word(*launch.kernel, parameters, extra, keep)) node->everything = true;
    node->launches.push_back(std::move(launch));
}

// Returns whether kernels on the device may give the node other parameters.
bool is_updated_by_device(CUgraphNode node) {
    CUlaunchAttributeValue value{};
    return driver.cuGraphKernelNodeGetAttribute &&
           driver.cuGraphKernelNodeGetAttribute(
               node, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value) == CUDA_SUCCESS &&
           value.deviceUpdatableKernelNode.deviceUpdatable;
}

// Returns false if the driver does not tell.
bool describe(CUgraphNode handle, Node* node) {
    CUgraphNodeType type;
    if (driver.cuGraphNodeGetType(handle, &type) != CUDA_SUCCESS) return false;
    switch (type) {
        case CU_GRAPH_NODE_TYPE_KERNEL: {
            CUDA_KERNEL_NODE_PARAMS_v2 kernel{};
            if (!driver.cuGraphKernelNodeGetParams_v2 || is_updated_by_device(handle) ||
                driver.cuGraphKernelNodeGetParams_v2(handle, &kernel) != CUDA_SUCCESS)
                return false;
            node->add(kernel);
            return true;
        }
        case CU_GRAPH_NODE_TYPE_MEMCPY: {
            CUDA_MEMCPY3D_v2 copy{};
            if (!driver.cuGraphMemcpyNodeGetParams ||
                driver.cuGraphMemcpyNodeGetParams(handle, &copy) != CUDA_SUCCESS)
                return false;
            node->add(write_sets::destination_of(copy));
            return true;
        }
        case CU_GRAPH_NODE_TYPE_MEMSET: {
            CUDA_MEMSET_NODE_PARAMS fill{};
            if (!driver.cuGraphMemsetNodeGetParams ||
                driver.cuGraphMemsetNodeGetParams(handle, &fill) != CUDA_SUCCESS)
                return false;
            node->add(write_sets::destination_of(fill));
            return true;
        }
        case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
            CUDA_BATCH_MEM_OP_NODE_PARAMS operations{};
            if (!driver.cuGraphBatchMemOpNodeGetParams ||
                driver.cuGraphBatchMemOpNodeGetParams(handle, &operations) != CUDA_SUCCESS)
                return false;
            node->add(operations);
            return true;
        }
        case CU_GRAPH_NODE_TYPE_GRAPH: {
            CUgraph child = nullptr;
            if (!driver.cuGraphChildGraphNodeGetGraph ||
                driver.cuGraphChildGraphNodeGetGraph(handle, &child) != CUDA_SUCCESS)
                return false;
            node->add(child);
            return true;
        }
        case CU_GRAPH_NODE_TYPE_HOST:
        case CU_GRAPH_NODE_TYPE_EMPTY:
        case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
        case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
        case CU_GRAPH_NODE_TYPE_MEM_ALLOC:  // allocates the driver's own memory
        case CU_GRAPH_NODE_TYPE_MEM_FREE:
            return true;
        case CU_GRAPH_NODE_TYPE_CONDITIONAL:
            return false;
    }
    return false;
}

// Returns false if the driver does not tell.
bool list(CUgraph graph, std::vector<CUgraphNode>* handles) {
    size_t count = 0;
    if (!driver.cuGraphGetNodes || !driver.cuGraphNodeGetType ||
        driver.cuGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS)
        return false;
    handles->resize(count);
    return !count || driver.cuGraphGetNodes(graph, handles->data(), &count) == CUDA_SUCCESS;
}

}  // namespace

void Node::add(const CUDA_KERNEL_NODE_PARAMS_v1& kernel) {
    add_kernel(this, kernel.func, write_sets::shape_of(kernel), kernel.kernelParams, kernel.extra);
}

void Node::add(const CUDA_KERNEL_NODE_PARAMS_v2& kernel) {
    add_kernel(this, kernel.func ? kernel.func : reinterpret_cast<CUfunction>(kernel.kern),
               write_sets::shape_of(kernel), kernel.kernelParams, kernel.extra);
}

void Node::add(const CUDA_KERNEL_NODE_PARAMS_v3& kernel) {
    add_kernel(this, kernel.func ? kernel.func : reinterpret_cast<CUfunction>(kernel.kern),
               write_sets::shape_of(kernel), kernel.kernelParams, kernel.extra);
}

void Node::add(const CUDA_BATCH_MEM_OP_NODE_PARAMS& operations) {
    cow::Range written;
    for (unsigned i = 0; operations.paramArray && i < operations.count; ++i) {
        if (!write_sets::destination_of(operations.paramArray[i], &written)) everything = true;
        add(written);
    }
}

void Node::add(const cow::Range& range) {
    if (range.end > range.begin) ranges.push_back(range);
}

void Node::add(CUgraph child) {
    for (Node& node : nodes_of(child)) {
        everything |= node.everything;
        std::move(node.launches.begin(), node.launches.end(), std::back_inserter(launches));
        ranges.insert(ranges.end(), node.ranges.begin(), node.ranges.end());
    }
}

std::vector<Node> nodes_of(CUgraph graph) {
    std::vector<CUgraphNode> handles;
    std::vector<Node> nodes;
    if (!list(graph, &handles)) {
        nodes.emplace_back().everything = true;
        return nodes;
    }
    std::sort(handles.begin(), handles.end());
    nodes.reserve(handles.size());
    for (CUgraphNode const handle : handles) {
        Node& node = nodes.emplace_back();
        node.handle = handle;
        if (!describe(handle, &node)) node.everything = true;
    }
    return nodes;
}

}  // namespace phos::graphs
