// Keep interprocess events out of graphs: a node would record, or wait for, the driver's event.
#include "base/overrides.h"
#include "gate/gate.h"
#include "memory/shared_events.h"

namespace phos {

using shared_events::fit_for_graph;

CUresult overrides::cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph,
                                              const CUgraphNode* before, size_t count,
                                              CUevent event) {
    if (!fit_for_graph(event)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphAddEventRecordNode(node, graph, before, count, event);
}
CUresult overrides::cuGraphAddEventWaitNode(CUgraphNode* node, CUgraph graph,
                                            const CUgraphNode* before, size_t count,
                                            CUevent event) {
    if (!fit_for_graph(event)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphAddEventWaitNode(node, graph, before, count, event);
}
CUresult overrides::cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
    if (!fit_for_graph(event)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphEventRecordNodeSetEvent(node, event);
}
CUresult overrides::cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
    if (!fit_for_graph(event)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphEventWaitNodeSetEvent(node, event);
}
CUresult overrides::cuGraphExecEventRecordNodeSetEvent(CUgraphExec graph, CUgraphNode node,
                                                       CUevent event) {
    if (!fit_for_graph(event)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphExecEventRecordNodeSetEvent(graph, node, event);
}
CUresult overrides::cuGraphExecEventWaitNodeSetEvent(CUgraphExec graph, CUgraphNode node,
                                                     CUevent event) {
    if (!fit_for_graph(event)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphExecEventWaitNodeSetEvent(graph, node, event);
}
CUresult overrides::cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* before,
                                   size_t count, CUgraphNodeParams* parameters) {
    const gate::Pass pass;
    if (!fit_for_graph(parameters)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphAddNode(node, graph, before, count, parameters);
}
CUresult overrides::cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* before,
                                      const CUgraphEdgeData* edges, size_t count,
                                      CUgraphNodeParams* parameters) {
    const gate::Pass pass;
    if (!fit_for_graph(parameters)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphAddNode_v2(node, graph, before, edges, count, parameters);
}
CUresult overrides::cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* parameters) {
    const gate::Pass pass;
    if (!fit_for_graph(parameters)) return CUDA_ERROR_NOT_SUPPORTED;
    return driver.cuGraphNodeSetParams(node, parameters);
}

}  // namespace phos
