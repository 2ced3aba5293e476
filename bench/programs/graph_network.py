"""Train a graph network of torch-geometric on a random graph.

    python graph_network.py

Its scattered sums are not deterministic: two undisturbed runs drift apart.
"""

from collections.abc import Iterator

import torch
import torch_geometric.nn as layers
from lines import print_lines

_NODES, _EDGES = 100_000, 800_000


def steps() -> Iterator[float]:
    torch.manual_seed(1)
    edges = torch.randint(_NODES, (2, _EDGES)).cuda()
    features = torch.randn(_NODES, 64).cuda()
    labels = torch.randint(10, (_NODES,)).cuda()
    first, second = layers.SAGEConv(64, 128).cuda(), layers.GCNConv(128, 10).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)
    while True:
        found = second(first(features, edges).relu(), edges)
        loss = torch.nn.functional.cross_entropy(found, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


if __name__ == "__main__":
    print_lines(steps())
