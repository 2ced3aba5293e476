// What graphs may write: noted when they are made executable, looked up when they are launched.
#pragma once

#include "write_sets/writes.h"

namespace phos::graphs {

// Counts the launch of the graph's kernels, and predicts what it may write.
void predict(write_sets::Prediction& prediction, CUgraphExec graph);

}  // namespace phos::graphs

namespace phos::write_sets {

struct GraphLaunched {
    static void predict(Prediction& prediction, CUgraphExec graph, CUstream) {
        graphs::predict(prediction, graph);
    }
};

}  // namespace phos::write_sets
