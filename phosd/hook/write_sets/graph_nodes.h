// Describe what one node of a graph may write when the graph is launched.
#pragma once

#include <vector>

#include "code/kernels.h"
#include "write_sets/launches.h"
#include "write_sets/writes.h"

namespace phos::graphs {

// A word of a kernel's parameters that may be an address, as visited by write_sets::each_word. It
// is checked at each launch, because blocks come and go.
struct Word {
    uint64_t address;
    uint64_t mask;
};

struct Launch {
    kernels::Kernel* kernel;
    std::vector<Word> words;
    write_sets::Shape shape;
    std::vector<unsigned char> parameters;  // the whole buffer; empty if it is not known
};

struct Node {
    CUgraphNode handle = nullptr;
    bool everything = false;  // cannot be known
    std::vector<Launch> launches;
    std::vector<cow::Range> ranges;

    void add(const CUDA_KERNEL_NODE_PARAMS_v1& kernel);
    void add(const CUDA_KERNEL_NODE_PARAMS_v2& kernel);
    void add(const CUDA_KERNEL_NODE_PARAMS_v3& kernel);
    void add(const CUDA_BATCH_MEM_OP_NODE_PARAMS& operations);
    void add(const cow::Range& range);
    void add(CUgraph child);
};

// Returns every node of the graph, by handle.
std::vector<Node> nodes_of(CUgraph graph);

}  // namespace phos::graphs
