#include "core/graph.h"

#include <algorithm>
#include <map>

#include "core/error.h"
#include "core/graph_memory.h"
#include "core/runtime.h"

namespace phos::softgpu {
namespace {

// One launch of a graph.
class GraphRun final : public Work {
  public:
    GraphRun(std::vector<Step> steps, GraphPtr kept)
        : steps_(std::move(steps)), kept_(std::move(kept)) {
        for (const Step& step : steps_) {
            Mark mark;
            std::shared_ptr<Event::Record> record;
            if (step.enabled && step.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
                record = std::make_shared<Event::Record>();
                record->mark = {std::make_shared<Timeline>(), 1};
                step.event->set(record, nullptr);
            } else if (step.enabled && step.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) {
                if (const auto recorded = step.event->record()) mark = recorded->mark;
            }
            marks_.push_back(std::move(mark));
            records_.push_back(std::move(record));
        }
    }

    CUresult run(Context& context) const override {
        CUresult result = context.broken();
        for (size_t i = 0; i < steps_.size(); ++i) {
            if (records_[i]) {  // whoever waits for the event must not wait for ever
                records_[i]->time = std::chrono::steady_clock::now();
                records_[i]->mark.timeline->advance();
            }
            if (result != CUDA_SUCCESS) continue;
            marks_[i].wait();
            if (steps_[i].enabled && steps_[i].work) result = steps_[i].work->run(context);
        }
        return result;
    }
    bool always() const override { return true; }

  private:
    const std::vector<Step> steps_;
    const GraphPtr kept_;                                  // its user objects last until the end
    std::vector<Mark> marks_;                              // to wait for, by step
    std::vector<std::shared_ptr<Event::Record>> records_;  // to reach, by step
};

}  // namespace

void UserObject::release(unsigned by) {
    unsigned held = count.load();
    do
        if (held == 0) return;  // the program released more than it held; it is destroyed once
    while (!count.compare_exchange_weak(held, held - std::min(held, by)));
    if (held > by) return;
    destroy(object);
    runtime().user_objects.forget(reinterpret_cast<CUuserObject>(this));
}

Graph::~Graph() {
    for (const auto& [object, count] : user_objects) object->release(count);
    for (const auto& node : nodes_)
        runtime().nodes.forget(reinterpret_cast<CUgraphNode>(node.get()));
}

Node& Graph::add(Node node) {
    node.graph = this;
    nodes_.push_back(std::make_shared<Node>(std::move(node)));
    runtime().nodes.add(nodes_.back());
    return *nodes_.back();
}

void Graph::remove(Node& node) {
    for (const auto& other : nodes_) {
        auto& from = other->dependencies;
        from.erase(std::remove(from.begin(), from.end(), &node), from.end());
    }
    runtime().nodes.forget(reinterpret_cast<CUgraphNode>(&node));
    nodes_.erase(std::find_if(nodes_.begin(), nodes_.end(),
                              [&](const auto& other) { return other.get() == &node; }));
}

std::vector<Node*> Graph::sorted() const {
    std::map<const Node*, size_t> missing;  // dependencies not yet in the order
    std::map<const Node*, std::vector<Node*>> dependents;
    std::vector<Node*> order;
    for (const auto& node : nodes_) {
        missing[node.get()] = node->dependencies.size();
        for (Node* from : node->dependencies) dependents[from].push_back(node.get());
        if (node->dependencies.empty()) order.push_back(node.get());
    }
    for (size_t i = 0; i < order.size(); ++i)
        for (Node* next : dependents[order[i]])
            if (--missing[next] == 0) order.push_back(next);
    require(order.size() == nodes_.size());
    return order;
}

GraphPtr Graph::clone() const {
    auto copy = std::make_shared<Graph>();
    std::map<const Node*, Node*> twins;
    for (const auto& node : nodes_) {
        Node twin = *node;
        twin.dependencies.clear();
        twin.original = node.get();
        if (node->child) twin.child = node->child->clone();
        twins[node.get()] = &copy->add(std::move(twin));
    }
    for (const auto& node : nodes_)
        for (const Node* from : node->dependencies)
            twins.at(node.get())->dependencies.push_back(twins.at(from));
    for (const auto& [object, count] : user_objects) {
        object->retain(count);
        copy->user_objects.emplace(object, count);
    }
    return copy;
}

GraphExec::GraphExec(const GraphPtr& graph, cuuint64_t flags_)
    : flags(flags_), kept_(graph->clone()) {
    spread(*graph, steps_);
}

void GraphExec::spread(const Graph& graph, std::vector<Step>& steps) {
    for (const Node* node : graph.sorted()) {
        steps.push_back({node, node->type, node->work, node->event});
        if (node->child) spread(*node->child, steps);
    }
}

WorkPtr GraphExec::launch() {
    std::lock_guard lock(mutex);
    launch_memory(steps_, flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    return std::make_shared<GraphRun>(steps_, kept_);
}

Step& GraphExec::step_of(const Node& node) {
    for (Step& step : steps_)
        if (step.node == &node) return step;
    fail(CUDA_ERROR_INVALID_VALUE);
}

CUgraphExecUpdateResult GraphExec::update(const Graph& graph, const Node*& offender) {
    std::vector<Step> fresh;
    spread(graph, fresh);
    std::lock_guard lock(mutex);
    if (has_memory_nodes(graph)) return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    if (fresh.size() != steps_.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (size_t i = 0; i < fresh.size(); ++i)
        if (fresh[i].type != steps_[i].type) {
            offender = fresh[i].node;
            return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
        }
    for (size_t i = 0; i < fresh.size(); ++i) {
        steps_[i].work = fresh[i].work;
        steps_[i].event = fresh[i].event;
    }
    kept_ = graph.clone();
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

}  // namespace phos::softgpu
