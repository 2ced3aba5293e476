#include "core/graph_memory.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "core/error.h"
#include "core/runtime.h"
#include "core/submit.h"

namespace phos::softgpu {
namespace {

std::mutex& g_mutex = *new std::mutex;  // over who holds what, and the table
auto& g_table = *new std::map<uint64_t, std::weak_ptr<GraphMemory>>;

const GraphMemoryPtr* allocated_by(const Step& step) {
    return step.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC
               ? &static_cast<const GraphAllocate&>(*step.work).memory
               : nullptr;
}
const GraphMemoryPtr* freed_by(const Step& step) {
    return step.type == CU_GRAPH_NODE_TYPE_MEM_FREE
               ? &static_cast<const GraphFree&>(*step.work).memory
               : nullptr;
}

}  // namespace

GraphMemory::GraphMemory(int device_, uint64_t address_, size_t size_)
    : device(device_), address(address_), size(size_) {}

GraphMemoryPtr GraphMemory::create(int device, size_t size, uint8_t access) {
    Heap& heap = runtime().device(device).graph_heap;
    for (unsigned peer = 0; peer < AddressSpace::kMaxDevices; ++peer)
        if (access >> peer & 1) heap.set_access(peer, true, true);
    const uint64_t address = runtime().allocate(heap, device, size, nullptr);
    GraphMemoryPtr memory(new GraphMemory(device, address, size));
    std::lock_guard lock(g_mutex);
    g_table[address] = memory;
    return memory;
}

GraphMemoryPtr GraphMemory::find(uint64_t address) {
    std::lock_guard lock(g_mutex);
    const auto found = g_table.find(address);
    return found == g_table.end() ? nullptr : found->second.lock();
}

GraphMemory::~GraphMemory() {
    {
        std::lock_guard lock(g_mutex);
        g_table.erase(address);  // before the heap may give the address to another
    }
    runtime().device(device).graph_heap.free(address);
}

void GraphMemory::give_back() {
    GraphMemoryPtr gone;  // ends after the lock
    std::lock_guard lock(g_mutex);
    require(held_ != nullptr);
    gone = std::move(held_);
}

void GraphMemory::claim_free_node() {
    require(!has_free_node_.exchange(true));
}

uint64_t allocate_in_graph(const StreamPtr& stream, int device, size_t size, uint8_t access) {
    auto memory = GraphMemory::create(device, size, access);
    submit(stream, std::make_shared<GraphAllocate>(memory));
    return memory->address;
}

bool has_memory_nodes(const Graph& graph) {
    return std::any_of(graph.nodes().begin(), graph.nodes().end(), [](const auto& node) {
        return node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
               node->type == CU_GRAPH_NODE_TYPE_MEM_FREE;
    });
}

void launch_memory(const std::vector<Step>& steps, bool free_first) {
    std::vector<GraphMemoryPtr> gone;  // ends after the lock
    std::lock_guard lock(g_mutex);
    std::set<const GraphMemory*> here;  // allocated so far by this launch
    for (const Step& step : steps) {
        if (const auto* memory = allocated_by(step)) {
            require(free_first || !(*memory)->held_);
            here.insert(memory->get());
        } else if (const auto* freed = freed_by(step)) {
            require(here.erase(freed->get()) > 0 || (*freed)->held_);
        }
    }
    for (const Step& step : steps) {
        if (const auto* memory = allocated_by(step)) (*memory)->held_ = *memory;
        if (const auto* freed = freed_by(step)) gone.push_back(std::move((*freed)->held_));
    }
}

}  // namespace phos::softgpu
