// Predict what graphs may write: recorded when they are instantiated, looked up at a launch.
#pragma once

#include "write_sets/writes.h"

namespace phos::graphs {

// Counts the launches of the graph's kernels, and predicts its writes.
void predict(write_sets::Prediction& prediction, CUgraphExec graph);

}  // namespace phos::graphs

namespace phos::write_sets {

struct GraphLaunched {
    static void predict(Prediction& prediction, CUgraphExec graph, CUstream) {
        graphs::predict(prediction, graph);
    }
};

}  // namespace phos::write_sets
