// Graphs: operations and their order, instantiated to be launched as one piece of work.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/event.h"
#include "core/stream.h"

namespace phos::softgpu {

class Graph;
class GraphExec;

struct Node {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    WorkPtr work;                     // null: nothing to do, or see below
    std::shared_ptr<Graph> child;     // for a node of type GRAPH
    EventPtr event;                   // for nodes that record or wait for one
    std::vector<Node*> dependencies;  // in the order they were given
    Graph* graph = nullptr;
    const Node* original = nullptr;  // in the graph that this one is a clone of
};

// A number that counts what holds the program's object (CUuserObject).
struct UserObject {
    UserObject(void* object_, CUhostFn destroy_, unsigned count_)
        : object(object_), destroy(destroy_), count(count_) {}
    void* const object;
    const CUhostFn destroy;
    std::atomic<unsigned> count;
    void retain(unsigned by) { count += by; }
    // The last one destroys the object and ends the handle.
    void release(unsigned by);
};

class Graph {
  public:
    ~Graph();
    Node& add(Node node);
    // Removes a node and every edge to it.
    void remove(Node& node);
    const std::vector<std::shared_ptr<Node>>& nodes() const { return nodes_; }
    // Dependencies first; throws CUDA_ERROR_INVALID_VALUE for a cycle.
    std::vector<Node*> sorted() const;
    std::shared_ptr<Graph> clone() const;

    std::mutex mutex;
    std::weak_ptr<GraphExec> exec;                                 // the last made from it
    std::map<std::shared_ptr<UserObject>, unsigned> user_objects;  // with how often each is held

  private:
    std::vector<std::shared_ptr<Node>> nodes_;
};
using GraphPtr = std::shared_ptr<Graph>;

// One operation of an instantiated graph. Child graphs are spread out.
struct Step {
    const Node* node;
    CUgraphNodeType type;
    WorkPtr work;
    EventPtr event;
    bool enabled = true;
};

class GraphExec {
  public:
    GraphExec(const GraphPtr& graph, cuuint64_t flags);

    const cuuint64_t flags;
    // The work of one launch. Steps run one after the other, which is one of the orders allowed.
    WorkPtr launch();
    // The step made from a node; throws CUDA_ERROR_INVALID_VALUE when there is none.
    Step& step_of(const Node& node);
    // Takes the operations and user objects of a graph of the same shape.
    CUgraphExecUpdateResult update(const Graph& graph, const Node*& offender);

    std::mutex mutex;

  private:
    static void spread(const Graph& graph, std::vector<Step>& steps);

    GraphPtr kept_;  // nodes and user objects stay as long as this
    std::vector<Step> steps_;
};

}  // namespace phos::softgpu
