// Memory that graphs allocate: nodes that allocate and nodes that free.
#pragma once

#include <atomic>
#include <memory>

#include "core/graph.h"
#include "core/heap.h"

namespace phos::softgpu {

// What one allocation node gives. The memory is taken when the node is made and kept as long as a
// graph, an instance of it or the program may use it; a launch only decides whose it is.
class GraphMemory : public std::enable_shared_from_this<GraphMemory> {
  public:
    // Throws CUDA_ERROR_OUT_OF_MEMORY. `access`: devices beside its own, as Heap::access.
    static std::shared_ptr<GraphMemory> create(int device, size_t size, uint8_t access);
    // What begins at `address`, or null.
    static std::shared_ptr<GraphMemory> find(uint64_t address);
    ~GraphMemory();

    const int device;
    const uint64_t address;
    const size_t size;

    // Frees it outside a graph. Throws CUDA_ERROR_INVALID_VALUE when no launch has allocated it.
    void give_back();

    // One node frees it, in whichever graph. Throws CUDA_ERROR_INVALID_VALUE the second time.
    void claim_free_node();

  private:
    friend void launch_memory(const std::vector<Step>& steps, bool free_first);
    GraphMemory(int device, uint64_t address, size_t size);
    // The program's own hold, from a launch that allocates it until it is freed.
    std::shared_ptr<GraphMemory> held_;
    std::atomic<bool> has_free_node_{false};
};
using GraphMemoryPtr = std::shared_ptr<GraphMemory>;

// Nothing is left to do when a stream comes to either: the launch has decided.
class GraphAllocate final : public Work {
  public:
    explicit GraphAllocate(GraphMemoryPtr memory_) : memory(std::move(memory_)) {}
    CUresult run(Context&) const override { return CUDA_SUCCESS; }
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_MEM_ALLOC; }
    const GraphMemoryPtr memory;
};
class GraphFree final : public Work {
  public:
    explicit GraphFree(GraphMemoryPtr memory_) : memory(std::move(memory_)) {}
    CUresult run(Context&) const override { return CUDA_SUCCESS; }
    CUgraphNodeType node_type() const override { return CU_GRAPH_NODE_TYPE_MEM_FREE; }
    const GraphMemoryPtr memory;
};

// cuMemAllocAsync in a stream that captures: a node, and the address that it will give.
uint64_t allocate_in_graph(const StreamPtr& stream, int device, size_t size, uint8_t access);

// Graphs with such nodes cannot be cloned, changed in shape or instantiated twice at a time.
bool has_memory_nodes(const Graph& graph);

// A launch of these steps: what they allocate must be free and what they only free allocated,
// otherwise throws CUDA_ERROR_INVALID_VALUE and changes nothing. With `free_first`, what an
// earlier launch left allocated is freed.
void launch_memory(const std::vector<Step>& steps, bool free_first);

}  // namespace phos::softgpu
